"""What the graph of a rollout holds after forks, restarts and rewritten histories: exact ids on every path, each sampled token once."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from jaxrl.batching import rollout_to_samples
from jaxrl.config.env import SamplingConfig
from jaxrl.envs.session import PolicySession
from jaxrl.errors import EnvError, PromptTooLongError
from jaxrl.inference.endpoint import GenerateRequest, sampling_seed
from jaxrl.inference.rendering import Renderer
from jaxrl.types import Rollout
from tests.envs.policies import IM_END, RENDERER, ids_of, make_rollout, open_session, path_ids
from tests.fakes import ScriptedEndpoint

THINK_STRIPPING = RENDERER.chat_template.replace(
    "message['content']", "(message['content'].split('</think>')[-1] if not loop.last else message['content'])"
)
STRIPPING_RENDERER = Renderer(RENDERER.tokenizer, THINK_STRIPPING, RENDERER.stop_ids)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def turn_of(request: GenerateRequest) -> str:
    """Return which turn of which conversation a request is of: what stands last in its name."""
    return request.request_id.rpartition("/")[2]


def telling(replies: dict[str, str], *, latency: Callable[[GenerateRequest], float] | None = None) -> ScriptedEndpoint:
    """Return an endpoint that answers by the name of the turn; `main.1` is turn 1 of the main conversation."""
    return ScriptedEndpoint(lambda request, _: [*ids_of(replies[turn_of(request)]), IM_END], latency=latency)


def shape(rollout: Rollout) -> list[tuple[int | None, str, str, bool]]:
    return [(node.parent, node.role, node.content, node.sampled) for node in rollout.nodes]


def check_paths(rollout: Rollout, endpoint: ScriptedEndpoint) -> None:
    """Assert that the path to each reply is exactly what was sent for it and what was sampled."""
    paths = [path_ids(rollout, index).tolist() for index, node in enumerate(rollout.nodes) if node.sampled]
    for request in endpoint.requests:
        whole = [*request.token_ids.tolist(), *endpoint.reply(request, 0)]
        assert whole in paths, f"{request.request_id}: its tokens are on no path"
    assert len(paths) == len(endpoint.requests)


async def test_a_fork_shares_what_was_said_and_each_reply_is_trained_in_one_branch() -> None:
    rollout, endpoint = make_rollout(), telling({"0": "A", "1": "B", "0.0": "C"})
    session = open_session(endpoint, rollout)
    await session.ask([user("q")])
    fork = session.fork()
    await session.ask([user("main")])
    await fork.ask([user("side")])
    assert shape(rollout) == [
        (None, "user", "q", False),
        (0, "assistant", "A", True),
        (1, "user", "main", False),
        (2, "assistant", "B", True),
        (1, "user", "side", False),
        (4, "assistant", "C", True),
    ]
    check_paths(rollout, endpoint)
    first, second = rollout_to_samples(rollout)
    assert (first.loss_mask.sum(), second.loss_mask.sum()) == (4, 2), "A is trained with B, and is context of C"
    assert (rollout.metrics["forks"], rollout.metrics["sub_conversations"]) == (0, 1)


async def test_what_one_says_the_other_does_not_see() -> None:
    endpoint = telling({"0": "A", "1": "B", "0.0": "C", "0.1": "D", "0.0.0": "E"})
    session = open_session(endpoint)
    await session.ask([user("q")])
    fork = session.fork()
    await fork.ask([user("side")])
    await fork.fork().ask([user("deep")])
    await session.ask([user("main")])
    await fork.ask([user("more")])
    asked = {turn_of(request): RENDERER.decode(request.token_ids) for request in endpoint.requests}
    assert "side" not in asked["1"] and "main" not in asked["0.1"] and "deep" not in asked["0.1"]
    assert "q" in asked["0.1"] and "side" in asked["0.1"] and "side" in asked["0.0.0"]


async def test_a_restart_begins_anew_and_shares_the_messages_that_it_begins_with() -> None:
    rollout, endpoint = make_rollout(), telling({"0": "A", "0.0": "B", "1.0": "C"})
    session = open_session(endpoint, rollout)
    system = {"role": "system", "content": "S"}
    await session.ask([system, user("q")])
    await session.restart().ask([system, user("other")])
    await session.restart().ask([user("alone")])
    assert [node.parent for node in rollout.nodes] == [None, 0, 1, 0, 3, None, 5]
    assert [node.content for node in rollout.nodes] == ["S", "q", "A", "other", "B", "alone", "C"]
    check_paths(rollout, endpoint)
    assert (rollout.metrics["forks"], rollout.metrics["sub_conversations"]) == (0, 2)


async def test_a_conversation_that_the_environment_tells_again_in_the_very_tokens_shares_the_reply_too() -> None:
    rollout, endpoint = make_rollout(), telling({"0": "A", "0.0": "B"})
    session = open_session(endpoint, rollout)
    await session.ask([user("q")])
    await session.restart().ask([user("q"), {"role": "assistant", "content": "A"}, user("next")])
    assert shape(rollout)[2:] == [(1, "user", "next", False), (2, "assistant", "B", True)]
    check_paths(rollout, endpoint)
    (sample,) = rollout_to_samples(rollout)
    assert sample.loss_mask.sum() == 4


async def test_the_same_question_asked_twice_has_one_node_and_two_replies() -> None:
    rollout, endpoint = make_rollout(), telling({"0.0": "A", "1.0": "A"})
    session = open_session(endpoint, rollout)
    for _ in range(2):
        await session.fork().ask([user("q")])
    assert [(node.parent, node.content) for node in rollout.nodes] == [(None, "q"), (0, "A"), (0, "A")]
    first, second = rollout_to_samples(rollout)
    assert first.token_ids.tolist() == second.token_ids.tolist() and first.loss_mask.sum() == second.loss_mask.sum() == 2


async def test_a_rewritten_history_shares_its_beginning_and_what_it_tells_again_is_marked() -> None:
    rollout, endpoint = make_rollout(), telling({"0": "<think>1+1</think>2", "1": "3", "2": "4"})
    session = open_session(endpoint, rollout, renderer=STRIPPING_RENDERER)
    await session.ask([user("1 + 1")])
    sampled = rollout.nodes[1].token_ids.copy()
    await session.ask([user("2 + 1")])
    await session.ask([user("3 + 1")])
    assert [node.parent for node in rollout.nodes] == [None, 0, 0, 2, 3, 4, 5]
    assert [node.role for node in rollout.nodes] == ["user", "assistant", "assistant", "user", "assistant", "user", "assistant"]
    assert [node.sampled for node in rollout.nodes] == [False, True, False, False, True, False, True]
    assert [node.is_retold for node in rollout.nodes] == [False, False, True, False, False, False, False]
    np.testing.assert_array_equal(rollout.nodes[1].token_ids, sampled)
    assert rollout.metrics["forks"] == 1 and "<think>" not in RENDERER.decode(endpoint.requests[1].token_ids)
    check_paths(rollout, endpoint)
    first, second = rollout_to_samples(rollout)
    assert first.loss_mask.sum() == rollout.nodes[1].num_sampled and second.loss_mask.sum() == 2 + 2


async def test_what_closes_a_shared_reply_belongs_to_the_message_after_it() -> None:
    rollout, endpoint = make_rollout(), telling({"0": "A", "1": "<think>x</think>B", "2": "C"})
    session = open_session(endpoint, rollout, renderer=STRIPPING_RENDERER)
    for text in ("a", "b", "c"):
        await session.ask([user(text)])
    # The third turn rewrites the second reply, and shares the first turn whole: its reply, too.
    assert [node.parent for node in rollout.nodes] == [None, 0, 1, 2, 2, 4, 5]
    assert [node.content for node in rollout.nodes] == ["a", "A", "b", "<think>x</think>B", "B", "c", "C"]
    closing = RENDERER.decode(rollout.nodes[2].token_ids)
    assert closing == "\n<|im_start|>user\nb<|im_end|>\n"
    check_paths(rollout, endpoint)
    assert [sample.loss_mask.sum() for sample in rollout_to_samples(rollout)] == [2 + len(ids_of("<think>x</think>B")) + 1, 2]


async def test_a_reply_that_the_limit_cut_is_shared_and_its_rest_goes_to_the_next_message() -> None:
    rollout = make_rollout()
    script = {"0": ids_of("AB"), "0.0": [*ids_of("C"), IM_END]}
    endpoint = ScriptedEndpoint(lambda request, _: script[turn_of(request)])
    session = open_session(endpoint, rollout)
    await session.ask([user("q")])
    await session.restart().ask([user("q"), {"role": "assistant", "content": "AB"}, user("next")])
    assert [node.parent for node in rollout.nodes] == [None, 0, 1, 2]
    assert RENDERER.decode(rollout.nodes[2].token_ids) == "<|im_end|>\n<|im_start|>user\nnext<|im_end|>\n"
    check_paths(rollout, endpoint)


async def test_forks_that_are_asked_at_the_same_time_are_seeded_and_named_alike_whatever_the_timing() -> None:
    async def played(delays: dict[str, float]) -> tuple[dict[str, tuple[int, list[int]]], Rollout, ScriptedEndpoint]:
        rollout = make_rollout(member=3, draw_index=9)
        endpoint = ScriptedEndpoint(
            lambda request, _: [65 + request.sampling.seed % 26, IM_END], latency=lambda request: delays.get(turn_of(request), 0.0)
        )
        session = open_session(endpoint, rollout)
        await session.ask([user("q")])
        forks = [session.fork() for _ in range(3)]

        async def twice(fork: PolicySession, name: str) -> None:
            await fork.ask([user(name)])
            await fork.ask([user("more")])

        await asyncio.gather(*(twice(fork, f"f{index}") for index, fork in enumerate(forks)), session.ask([user("main")]))
        check_paths(rollout, endpoint)
        return {r.request_id: (r.sampling.seed, r.token_ids.tolist()) for r in endpoint.requests}, rollout, endpoint

    slow_first, first, endpoint = await played({"0.0": 0.03, "1": 0.05})
    slow_last, last, _ = await played({"2.0": 0.03, "2.1": 0.02})
    assert slow_first == slow_last and len({seed for seed, _ in slow_first.values()}) == len(endpoint.requests) == 8
    assert sorted(name.rpartition("/")[2] for name in slow_first) == ["0", "0.0", "0.1", "1", "1.0", "1.1", "2.0", "2.1"]
    assert [node.content for node in first.nodes] != [node.content for node in last.nodes], "or the timing would have shown nothing"
    assert slow_first["g9/3/1"][0] == sampling_seed(0, "toy", 9, 3, 1), "the main conversation is seeded by its turns alone"
    trained = [sum(sample.loss_mask.sum() for sample in rollout_to_samples(rollout)) for rollout in (first, last)]
    assert trained == [16, 16]


async def test_a_session_that_waits_for_a_reply_cannot_be_asked_and_can_be_afterwards_whatever_became_of_it() -> None:
    endpoint = telling({"0": "A"}, latency=lambda _: 0.01)
    session = open_session(endpoint)
    asked = asyncio.create_task(session.ask([user("q")]))
    await asyncio.sleep(0)
    with pytest.raises(EnvError, match=r"turn 1: the session was asked while it waits for a reply; `fork` it"):
        await session.ask([user("too soon")])
    assert (await asked).text == "A"
    endpoint.failure = RuntimeError("down")
    for _ in range(2):
        with pytest.raises(Exception, match="down"):
            await session.ask([user("again")])


async def test_errors_count_turns_from_one_as_the_viewer_does_and_name_the_sub_conversation() -> None:
    session = open_session(telling({"0": "A", "0.0": "B", "0.1.0": "C"}), window=60)
    await session.ask([user("q")])
    session.fork()
    beside = session.fork()
    with pytest.raises(PromptTooLongError, match=r"task 't', turn 2: the prompt has \d+ tokens"):
        await session.ask([user("long " * 60)])
    with pytest.raises(PromptTooLongError, match=r"task 't', turn 1 of sub-conversation 2: the prompt has"):
        await beside.ask([user("long " * 60)])
    with pytest.raises(PromptTooLongError, match=r"task 't', turn 1 of sub-conversation 2\.1: the prompt has"):
        await beside.restart().ask([user("long " * 60)])


async def test_a_question_that_was_not_answered_leaves_no_trace_and_may_be_asked_again() -> None:
    rollout, endpoint = make_rollout(), telling({"0": "A", "1": "B"})
    session = open_session(endpoint, rollout)
    await session.ask([user("q")])
    endpoint.failure = RuntimeError("down")
    with pytest.raises(Exception, match="down"):
        await session.ask([user("lost")])
    assert len(rollout.nodes) == 2
    endpoint.failure = None
    await session.ask([user("again")])
    assert [node.content for node in rollout.nodes] == ["q", "A", "again", "B"]


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 8}'}}
BROKEN = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a": '}}


async def test_messages_with_calls_and_tools_are_readable_and_keep_their_names() -> None:
    rollout = make_rollout()
    template = RENDERER.chat_template.replace("message['content']", "(message['content'] or (message['tool_calls'] | tojson))")
    renderer = Renderer(RENDERER.tokenizer, template, RENDERER.stop_ids)
    opening = [
        user("q"),
        {"role": "assistant", "content": None, "tool_calls": [CALL, BROKEN]},
        {"role": "tool", "content": "8", "name": "add", "tool_call_id": "c1"},
    ]
    await open_session(telling({"0": "A"}), rollout, renderer=renderer).ask(opening)
    _, calling, result, _ = rollout.nodes
    assert calling.content == 'add({"a": 8})\nadd({"a": )' and not calling.sampled
    good, bad = calling.tool_calls
    assert (good.id, good.name, good.arguments, good.error) == ("c1", "add", {"a": 8}, "")
    assert (bad.arguments, bad.raw, bad.error) == (None, '{"a": ', "the arguments are no JSON object")
    assert (result.role, result.name, result.content, result.tool_calls) == ("tool", "add", "8", ())


async def test_a_cut_reply_of_the_main_conversation_marks_the_rollout_and_one_beside_it_does_not() -> None:
    rollout = make_rollout()
    endpoint = ScriptedEndpoint(lambda request, _: [70, 71] if "." in turn_of(request) else [70, IM_END])
    session = open_session(endpoint, rollout, sampling=SamplingConfig(max_tokens=2))
    await session.ask([user("q")])
    assert not (await session.fork().ask([user("side")])).is_stopped and not rollout.is_truncated
    endpoint.reply = lambda request, _: [70, 71]
    await session.ask([user("more")])
    assert rollout.is_truncated


async def test_content_masks_follow_their_tokens_where_a_message_is_cut_at_what_is_shared() -> None:
    rollout, endpoint = make_rollout(), telling({"0": "A", "1": "<think>x</think>B", "2": "C"})
    session = open_session(endpoint, rollout, renderer=STRIPPING_RENDERER)
    for text in ("a", "b", "c"):
        await session.ask([user(text)])
    seen = 0
    for node in rollout.nodes:
        if not node.sampled and node.is_content is not None:
            seen += 1
            assert len(node.is_content) == len(node.token_ids)
            assert RENDERER.decode(node.token_ids[node.is_content]) == node.content
    assert seen == 4
