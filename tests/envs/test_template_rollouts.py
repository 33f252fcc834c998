"""Rollouts over every committed chat template: what was sent and sampled is what is trained on, each sampled token once."""

import numpy as np
import pytest

from jaxrl.batching import pack, rollout_to_samples
from jaxrl.config.env import SamplingConfig
from jaxrl.envs.base import Reply
from jaxrl.envs.session import PolicySession
from jaxrl.inference.pool import PolicyPool
from jaxrl.types import Rollout
from tests.envs.policies import make_rollout
from tests.fakes import ScriptedEndpoint
from tests.inference.rendering.conversations import SCRIPTS, answering, play, tools_of
from tests.inference.rendering.styles import ADD, ids_of, renderer_of, result, user
from tests.inference.rendering.test_templates import CASES, FORKS


def session_of(style: str, endpoint: ScriptedEndpoint, rollout: Rollout, *, history: str = "template", **sampling: object) -> PolicySession:
    return PolicySession(
        PolicyPool([endpoint], 0),
        renderer_of(style),
        rollout,
        SamplingConfig(**sampling),
        run_seed=0,
        seed_scope="toy",
        window=4096,
        history=history,
    )


def writing(*replies: np.ndarray) -> ScriptedEndpoint:
    """Return an endpoint that samples these ids, one reply after another."""
    return ScriptedEndpoint(lambda request, _: replies[int(request.request_id.rpartition("/")[2])].tolist())


def trained_runs(rollout: Rollout) -> list[list[int]]:
    """Return every run of neighbouring trained tokens, over all samples."""
    runs: list[list[int]] = []
    for sample in rollout_to_samples(rollout):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask.astype(int), [0]])))
        runs += [sample.token_ids[begin:end].tolist() for begin, end in edges.reshape(-1, 2)]
    return runs


@pytest.mark.parametrize("history", ["template", "keep"])
@pytest.mark.parametrize(("style", "script"), CASES)
async def test_each_sampled_token_trains_once_over_all_branches_and_forks_are_counted(style: str, script: str, history: str) -> None:
    tools = tools_of(script)
    turns = play(style, script, history)
    sampled = [one.sampled for one in turns]
    rollout, endpoint = make_rollout(), writing(*sampled)
    session = session_of(style, endpoint, rollout, history=history)
    reply: Reply | None = None
    for said, _ in SCRIPTS[script]:
        reply = await session.ask(answering(said, reply.tool_calls if reply else ()), tools=tools)
    assert [request.token_ids.tolist() for request in endpoint.requests] == [one.turn.prompt_ids.tolist() for one in turns]
    samples = rollout_to_samples(rollout)
    num_forks = FORKS.get((style, script), 0) if history == "template" else 0
    assert rollout.metrics["forks"] == num_forks and len(samples) == num_forks + 1
    assert sorted(trained_runs(rollout)) == sorted(ids.tolist() for ids in sampled)
    for one in turns:
        seen = [*one.turn.prompt_ids.tolist(), *one.sampled.tolist()]
        assert any(sample.token_ids[: len(seen)].tolist() == seen for sample in samples)


@pytest.mark.parametrize("style", ["chatml", "llama3", "qwen3", "gemma", "mistral", "no_turn_end", "dated", "channels"])
async def test_neither_the_header_of_a_reply_nor_what_follows_its_end_is_trained(style: str) -> None:
    renderer, rollout = renderer_of(style), make_rollout()
    ok = np.append(ids_of(renderer, "ok"), renderer.turn_end_id)
    session = session_of(style, writing(ok, ok), rollout)
    await session.ask([user("1?")])
    await session.ask([user("2?")])
    assert trained_runs(rollout) == [ok.tolist()] * 2


async def test_an_end_that_nobody_sampled_is_not_trained_whatever_cut_the_reply() -> None:
    renderer, rollout = renderer_of("chatml"), make_rollout()
    cut = ids_of(renderer, "1 STOP")
    session = session_of("chatml", writing(cut, cut[:1]), rollout, stop=["STOP"])
    assert (await session.ask([user("1?")])).text == "1 "
    await session.ask([user("2?")])
    (sample,) = rollout_to_samples(rollout)
    assert trained_runs(rollout) == [cut.tolist(), cut[:1].tolist()]
    closing = np.flatnonzero(sample.token_ids == renderer.turn_end_id)
    assert len(closing) == 3 and not sample.loss_mask[closing].any(), "two questions and the end of the first reply"
    assert not sample.inference_logprobs[closing].any()


@pytest.mark.parametrize("stop", ["<|eot_id|>", "<|end_of_text|>"])
async def test_a_reply_is_whole_if_any_of_the_ids_that_end_one_was_sampled(stop: str) -> None:
    renderer, rollout = renderer_of("llama3"), make_rollout()
    said = ids_of(renderer, f"4{stop}")
    endpoint = writing(said, said[:1])
    session = session_of("llama3", endpoint, rollout)
    assert renderer.tokenizer.eos_token == "<|end_of_text|>", "and turns end in <|eot_id|>"
    reply = await session.ask([user("2+2?")])
    assert reply.is_stopped and reply.text == "4" and not rollout.is_truncated
    cut = await session.ask([user("Sure?")])
    assert not cut.is_stopped and rollout.is_truncated


async def test_history_is_what_was_sampled_though_the_environment_changes_its_messages_later() -> None:
    renderer, rollout = renderer_of("chatml"), make_rollout()
    call = np.append(ids_of(renderer, '<tool_call>{"arguments":{"b":2,  "a":1},"name":"add"}</tool_call>'), renderer.turn_end_id)
    endpoint = writing(call, np.append(ids_of(renderer, "3"), renderer.turn_end_id))
    session = session_of("chatml", endpoint, rollout)
    question, messages = user("1+2?"), []
    messages.append(question)
    reply = await session.ask(messages, tools=[ADD])
    question["content"] = "something else"
    messages.clear()
    assert reply.tool_calls[0].arguments == {"a": 1, "b": 2}
    reply.tool_calls[0].arguments.clear()
    await session.ask([result("3", reply.tool_calls[0].id)], tools=[ADD])
    first, second = (request.token_ids.tolist() for request in endpoint.requests)
    assert second[: len(first) + len(call)] == [*first, *call.tolist()], "the order and the spaces of the call are the policy's"
    assert "1+2?" in renderer.decode(second) and "something else" not in renderer.decode(second)


async def test_a_history_that_is_told_again_has_the_arguments_that_were_written_though_a_tool_changed_its_own() -> None:
    renderer, rollout = renderer_of("mistral"), make_rollout()
    call = np.append(ids_of(renderer, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": [1]}}]'), renderer.turn_end_id)
    four = np.append(ids_of(renderer, " 4"), renderer.turn_end_id)
    endpoint = writing(call, four, four)
    session = session_of("mistral", endpoint, rollout)
    reply = await session.ask([user("1+2?")], tools=[ADD])
    reply.tool_calls[0].arguments["a"].append("changed")
    await session.ask([result("3", reply.tool_calls[0].id)], tools=[ADD])
    await session.ask([user("Sure?")], tools=[ADD])
    told = renderer.decode(endpoint.requests[-1].token_ids)
    assert rollout.metrics["forks"] == 1 and '"arguments": {"a": [1]}' in told and "changed" not in told


async def test_a_reply_that_would_be_encoded_in_fewer_tokens_has_one_record_for_each_that_was_sampled() -> None:
    renderer, rollout = renderer_of("qwen3"), make_rollout()
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    spelt = np.concatenate([ids_of(renderer, piece) for piece in ("<tool_call>", *text[11:-12], "</tool_call>")])
    assert len(spelt) > len(ids_of(renderer, text)) and renderer.decode(spelt) == text
    spelt = np.append(spelt, renderer.turn_end_id)
    session = session_of("qwen3", writing(spelt, spelt[-1:]), rollout)
    reply = await session.ask([user("1?")], tools=[ADD])
    assert [call.name for call in reply.tool_calls] == ["add"]
    await session.ask([result("1", reply.tool_calls[0].id)], tools=[ADD])
    node = next(node for node in rollout.nodes if node.sampled)
    assert node.num_sampled == len(node.logprobs) == len(node.versions) == len(spelt)
    (sample,) = rollout_to_samples(rollout)
    assert len(sample.token_ids) == len(sample.loss_mask) == len(sample.inference_logprobs)
    assert sample.loss_mask.sum() == (sample.inference_logprobs == -1).sum() == len(spelt) + 1


async def test_replies_that_are_nothing_but_an_end_are_turns_like_others() -> None:
    for style in ("chatml", "mistral", "opens_thinking"):
        renderer, rollout = renderer_of(style), make_rollout()
        end = np.array([renderer.turn_end_id])
        session = session_of(style, writing(end, end, np.append(ids_of(renderer, "4"), end)), rollout)
        replies = [await session.ask([user(text)]) for text in ("1?", "", "2?")]
        assert [(reply.text, reply.num_tokens, reply.is_stopped) for reply in replies] == [("", 1, True), ("", 1, True), ("4", 2, True)]
        assert [node.content for node in rollout.nodes if node.sampled] == ["", "", "4"]
        assert sorted(map(len, trained_runs(rollout))) == [1, 1, 2]


async def test_a_reply_of_one_token_is_trained_with_its_one_target_a_negative_credit_included() -> None:
    renderer, rollout = renderer_of("chatml"), make_rollout()
    await session_of("chatml", writing(np.array([renderer.turn_end_id])), rollout).ask([user("1?")])
    rollout.samples = rollout_to_samples(rollout)
    rollout.assign_advantages(-0.5)
    batch = pack(rollout.samples, row_length=64, rows=1, shards=1)
    (rows,) = batch.micro_batches
    assert batch.member_counts.tolist() == [[1, 0, 0]] and batch.num_loss_tokens == 1
    assert rows.advantages[rows.loss_mask].tolist() == [-0.5] and rows.token_ids[rows.loss_mask].tolist() == [renderer.turn_end_id]


async def test_parallel_calls_are_answered_under_their_ids_and_their_results_are_no_replies() -> None:
    renderer, rollout = renderer_of("qwen3"), make_rollout()
    calls = "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {n}, "b": null}}}}\n</tool_call>' for n in (1, 2))
    session = session_of("qwen3", writing(*(np.append(ids_of(renderer, text), renderer.turn_end_id) for text in (calls, "3"))), rollout)
    reply = await session.ask([user("1?")], tools=[ADD])
    assert [(call.arguments, call.error) for call in reply.tool_calls] == [({"a": 1, "b": None}, ""), ({"a": 2, "b": None}, "")]
    await session.ask([result(str(n), call.id) for n, call in enumerate(reply.tool_calls)], tools=[ADD])
    assert [(node.role, node.sampled) for node in rollout.nodes] == [
        ("user", False), ("assistant", True), ("tool", False), ("tool", False), ("assistant", True)
    ]  # fmt: skip
