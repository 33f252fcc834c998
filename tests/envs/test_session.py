"""What a session records, how it clamps, seeds and refuses."""

import asyncio
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.batching import rollout_to_samples
from jaxrl.config.env import SamplingConfig
from jaxrl.envs.session import PolicySession, eval_seed_scope
from jaxrl.errors import EngineError, PromptTooLongError
from jaxrl.inference.endpoint import FinishReason, GenerateRequest, Generation, sampling_seed
from jaxrl.inference.pool import PolicyPool
from jaxrl.inference.rendering import Renderer
from tests.envs.policies import IM_END, RENDERER, ids_of, make_rollout, open_session, path_ids, saying
from tests.envs.test_transcript import STRIPPING_RENDERER
from tests.fakes import ScriptedEndpoint


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_a_turn_is_recorded_as_message_nodes_and_one_node_whose_tail_was_sampled() -> None:
    rollout, endpoint = make_rollout(), saying("11")
    reply = await open_session(endpoint, rollout).ask([{"role": "system", "content": "Add."}, user("8 + 3")])
    system, question, answer = rollout.nodes
    assert (reply.text, reply.is_stopped, reply.num_tokens) == ("11", True, 3)
    assert [n.role for n in rollout.nodes] == ["system", "user", "assistant"] and [n.parent for n in rollout.nodes] == [None, 0, 1]
    assert [n.sampled for n in rollout.nodes] == [False, False, True]
    assert RENDERER.decode(question.token_ids) == "<|im_start|>user\n8 + 3<|im_end|>\n" and system.content == "Add."
    assert answer.num_sampled == 3 and answer.token_ids[-3:].tolist() == [*ids_of("11"), IM_END]
    assert RENDERER.decode(answer.token_ids[:-3]) == "<|im_start|>assistant\n"
    assert len(answer.logprobs) == len(answer.versions) == 3 and answer.finish_reason == "stop" and answer.temperature == 1.0
    assert answer.token_ids.dtype == np.int32 and answer.loss_mask is None
    assert rollout.num_completion_tokens == 3 and (rollout.nodes[-1].role, rollout.nodes[-1].content) == ("assistant", "11")


replies = st.lists(st.one_of(st.sampled_from([3, 4]), st.integers(min_value=3, max_value=319)), max_size=5)


@settings(max_examples=30, deadline=None)
@given(
    turns=st.lists(st.tuples(st.text(max_size=5), replies, st.booleans()), min_size=1, max_size=4),
    renderer=st.sampled_from([RENDERER, STRIPPING_RENDERER]),
)
def test_a_branch_holds_exactly_the_ids_that_the_policy_was_sent_and_sampled(
    turns: list[tuple[str, list[int], bool]], renderer: Renderer
) -> None:
    sampled = [[*body, IM_END] if stops else body for _, body, stops in turns]
    endpoint = ScriptedEndpoint(lambda request, _: sampled[int(request.request_id.rpartition("/")[2])])
    rollout = make_rollout()

    async def play() -> None:
        session = open_session(endpoint, rollout, renderer=renderer)
        for text, _, _ in turns:
            await session.ask([user(text)])

    asyncio.run(play())
    leaves = [index for index, node in enumerate(rollout.nodes) if node.sampled]
    assert len(leaves) == len(turns)
    for leaf, request, ids in zip(leaves, endpoint.requests, sampled, strict=True):
        np.testing.assert_array_equal(path_ids(rollout, leaf), np.concatenate([request.token_ids, np.array(ids, np.int32)]))
    assert sum(sample.loss_mask.sum() for sample in rollout_to_samples(rollout)) == sum(map(len, sampled)), "each sampled token once"
    assert renderer is STRIPPING_RENDERER or (rollout.metrics["forks"] == 0 and len(rollout.leaves) == 1)


@pytest.mark.parametrize("sampled", [[IM_END], []])
async def test_a_reply_of_nothing_or_of_the_end_token_alone_has_a_node_and_the_next_turn_follows(sampled: list[int]) -> None:
    rollout = make_rollout()
    session = open_session(ScriptedEndpoint(lambda request, version: sampled), rollout)
    reply = await session.ask([user("hi")])
    assert reply.text == "" and reply.num_tokens == len(sampled)
    await session.ask([user("say something")])
    assert [n.role for n in rollout.nodes] == ["user", "assistant", "user", "assistant"]
    assert rollout.num_turns == 2 and rollout.num_completion_tokens == 2 * len(sampled)


async def test_an_emoji_cut_in_two_keeps_its_ids() -> None:
    emoji = ids_of("😀")
    rollout = make_rollout()
    reply = await open_session(ScriptedEndpoint(lambda request, version: emoji[:2]), rollout).ask([user("hi")])
    assert reply.text == "�" and rollout.nodes[-1].token_ids[-2:].tolist() == emoji[:2]


async def test_max_tokens_is_clamped_to_what_is_left_of_the_window_and_the_config_is_unchanged() -> None:
    sampling = SamplingConfig(max_tokens=400)
    endpoint = saying("1", "2")
    session = open_session(endpoint, sampling=sampling, window=64)
    await session.ask([user("hi")])
    await session.ask([user("hi")])
    for request in endpoint.requests:
        assert request.sampling.max_tokens == 64 - len(request.token_ids)
    assert sampling.max_tokens == 400
    roomy = saying("1")
    await open_session(roomy, sampling=SamplingConfig(max_tokens=4), window=64).ask([user("hi")])
    assert roomy.requests[0].sampling.max_tokens == 4


async def test_a_prompt_that_fills_the_window_is_refused_before_the_policy_is_asked() -> None:
    endpoint, rollout = saying("1"), make_rollout()
    length = len(RENDERER.open_turn(None, [user("hi")]).prompt_ids)
    with pytest.raises(PromptTooLongError, match=rf"has {length} tokens and the window is {length}.*`inference.max_model_len`"):
        await open_session(endpoint, rollout, window=length).ask([user("hi")])
    assert endpoint.requests == [] and rollout.nodes == []
    await open_session(endpoint, rollout, window=length + 1).ask([user("hi")])
    assert endpoint.requests[0].sampling.max_tokens == 1


async def test_both_turns_are_sampled_alike_but_for_seed_and_budget() -> None:
    sampling = SamplingConfig(temperature=0.7, max_tokens=5, stop=["\n\n"])
    endpoint = saying("1", "2")
    session = open_session(endpoint, sampling=sampling)
    await session.ask([user("a")])
    await session.ask([user("b")])
    first, second = (request.sampling for request in endpoint.requests)
    assert first.seed != second.seed
    for field in ("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop_ids", "stop"):
        assert getattr(first, field) == getattr(second, field)
    assert first.stop_ids == RENDERER.stop_ids and first.temperature == 0.7 and first.stop == ("\n\n",)


async def test_seeds_are_folded_from_scope_draw_member_and_turn() -> None:
    endpoint = saying("1", "2")
    rollout = make_rollout(member=3, draw_index=9)
    session = open_session(endpoint, rollout)
    await session.ask([user("a")])
    await session.ask([user("b")])
    assert [r.sampling.seed for r in endpoint.requests] == [sampling_seed(0, "toy", 9, 3, turn) for turn in (0, 1)]
    await open_session(endpoint, make_rollout(member=3, draw_index=9), seed_scope=eval_seed_scope("toy")).ask([user("a")])
    assert endpoint.requests[-1].sampling.seed == sampling_seed(0, "eval:toy", 9, 3, 0) != endpoint.requests[0].sampling.seed


async def test_a_reply_that_ends_with_a_stop_string_is_shown_up_to_it_and_recorded_whole() -> None:
    rollout = make_rollout()
    endpoint = ScriptedEndpoint(lambda request, version: ids_of("ok STOP"))
    reply = await open_session(endpoint, rollout, sampling=SamplingConfig(stop=["STOP"])).ask([user("hi")])
    assert reply.text == "ok " and rollout.nodes[-1].num_sampled == len(ids_of("ok STOP"))


class BrokenEndpoint(ScriptedEndpoint):
    """Answers with arrays that break the contract of `Generation`."""

    def __init__(self, **broken: object) -> None:
        super().__init__()
        self.broken = broken

    async def generate(self, request: GenerateRequest) -> Generation:
        fields = {
            "token_ids": np.array([70, 71], np.int32),
            "logprobs": np.zeros(2, np.float32),
            "versions": np.zeros(2, np.int32),
            "finish_reason": FinishReason.LENGTH,
        }
        return Generation(**(fields | self.broken))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"logprobs": np.zeros(1, np.float32)}, "differ in length"),
        ({"versions": np.zeros(3, np.int32)}, "differ in length"),
        ({"logprobs": np.array([-1.0, np.nan], np.float32)}, "sampled token 1 is nan"),
        ({"logprobs": np.array([-np.inf, -1.0], np.float32)}, "sampled token 0 is -inf"),
        ({"finish_reason": FinishReason.CANCELLED}, "cancelled after 2 tokens"),
    ],
)
async def test_an_answer_that_cannot_be_trained_on_is_an_error(broken: dict, message: str) -> None:
    rollout = make_rollout()
    with pytest.raises(EngineError, match=message):
        await open_session(BrokenEndpoint(**broken), rollout).ask([user("hi")])
    assert rollout.nodes == []


async def test_forks_are_sampled_like_their_session_and_seeded_by_their_place() -> None:
    endpoint = ScriptedEndpoint(lambda request, _: [70, IM_END])
    sampling = SamplingConfig(temperature=0.7, max_tokens=5, stop=["\n\n"])
    session = open_session(endpoint, make_rollout(member=3, draw_index=9), sampling=sampling, window=64)
    await session.ask([user("a")])
    await session.fork().ask([user("b")])
    restarted = session.restart()
    await restarted.ask([user("c")])
    await restarted.fork().ask([user("d")])
    assert [r.request_id for r in endpoint.requests] == ["g9/3/0", "g9/3/0.0", "g9/3/1.0", "g9/3/1.0.0"]
    assert [r.sampling.seed for r in endpoint.requests] == [sampling_seed(0, "toy", 9, 3, turn) for turn in (0, "0.0", "1.0", "1.0.0")]
    assert len({dataclasses.replace(r.sampling, seed=0) for r in endpoint.requests}) == 1


async def test_every_request_is_salted_by_the_version_that_is_served_then() -> None:
    versions = iter(["v0", "v1"])
    endpoint = saying("1", "2")
    pool, rollout = PolicyPool([endpoint], 0), make_rollout()
    session = PolicySession(
        pool, RENDERER, rollout, SamplingConfig(), run_seed=0, seed_scope="toy", window=512, cache_salt=lambda: next(versions)
    )
    await session.ask([user("a")])
    await session.ask([user("b")])
    assert [(request.cache_salt, request.wants_logprobs) for request in endpoint.requests] == [("v0", True), ("v1", True)]


async def test_a_frozen_models_tokens_are_recorded_without_logprobs_and_versions_and_none_are_asked_for() -> None:
    class Silent(ScriptedEndpoint):
        async def generate(self, request: GenerateRequest) -> Generation:
            generation = await super().generate(request)
            return dataclasses.replace(generation, logprobs=np.full(len(generation.token_ids), np.nan, np.float32))

    endpoint, rollout = Silent(lambda request, version: [*ids_of("11"), IM_END]), make_rollout()
    sampling = SamplingConfig(temperature=0.0, top_k=3)
    pool = PolicyPool([endpoint], 0)
    session = PolicySession(pool, RENDERER, rollout, sampling, run_seed=0, seed_scope="toy", window=512, is_frozen=True)
    assert (await session.ask([user("8 + 3")])).text == "11"
    reply = rollout.nodes[-1]
    assert (reply.logprobs, reply.versions, reply.source, reply.num_sampled) == (None, None, "frozen", 3)
    (request,) = endpoint.requests
    assert (request.wants_logprobs, request.cache_salt, request.sampling.temperature, request.sampling.top_k) == (False, None, 0.0, 3)


async def test_a_frozen_model_that_writes_an_id_beyond_the_policys_vocabulary_is_an_error() -> None:
    beyond = RENDERER.num_ids
    pool, rollout = PolicyPool([ScriptedEndpoint(lambda request, version: [70, beyond])], 0), make_rollout()
    session = PolicySession(pool, RENDERER, rollout, SamplingConfig(), run_seed=0, seed_scope="toy", window=512, is_frozen=True)
    with pytest.raises(EngineError, match=f"wrote token id {beyond}, and the policy's vocabulary ends at {beyond - 1}"):
        await session.ask([user("8 + 3")])
    assert rollout.nodes == []
