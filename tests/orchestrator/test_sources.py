"""Who writes an environment's replies, and what follows from it: seeds, salts, places, windows, staleness."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from jaxrl.config.env import SamplingConfig
from jaxrl.config.model import FrozenModelConfig
from jaxrl.envs.base import Outcome, Session, TaskSpec
from jaxrl.errors import ConfigError
from jaxrl.inference.endpoint import sampling_seed
from jaxrl.orchestrator.sampler import Sampler
from jaxrl.orchestrator.sources import DemonstrationSource, FrozenSource, PolicySource
from jaxrl.types import Boundary, Rollout, Task
from tests.fakes import ScriptedPool, ToyEnv
from tests.inference.wire_server import MODEL, WINDOW, FakeModel, WireServer
from tests.orchestrator.wiring import ROW_LENGTH, renderer


class Neighbour:
    """A tokenizer of the policy's vocabulary but for one token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        return renderer().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Any) -> str:
        return "".join("?" if token_id == 70 else renderer().decode([token_id]) for token_id in token_ids)


def rollout_of(environment: ToyEnv, member: int = 0) -> Rollout:
    spec = environment.tasks()[0]
    return Rollout(Task(environment.name, spec["id"], spec), f"{environment.name}/5", member=member, draw_index=5)


@asynccontextmanager
async def frozen(
    model: FakeModel, *, max_concurrency: int = 4, window: int = ROW_LENGTH, sampling: SamplingConfig | None = None
) -> AsyncIterator[tuple[Sampler, WireServer]]:
    """Give a sampler of a toy environment whose replies come from `model`, not set up, and the server."""
    async with WireServer(model).running() as server:
        config = FrozenModelConfig(name=MODEL, base_url=[server.base_url], max_concurrency=max_concurrency)
        source = FrozenSource(config, renderer(), sampling or SamplingConfig(max_tokens=4), run_seed=7, window=window)
        sampler = Sampler(ToyEnv(), source, rollout_deadline_s=5.0)
        try:
            yield sampler, server
        finally:
            for pool in sampler.connected_pools:
                await pool.close()


async def test_a_frozen_model_of_the_same_vocabulary_is_asked_in_tokens_without_logprobs_or_salt() -> None:
    async with frozen(FakeModel(tokenizer=renderer())) as (sampler, server):
        await sampler.setup()
        rollout = rollout_of(sampler.environment, member=2)
        await sampler.play(rollout)
        assert rollout.failure is None and rollout.reward is not None
        (call,) = [call for call in server.calls if call.path == "/inference/v1/generate" and call.body]
        settings = call.body["sampling_params"]
        assert "cache_salt" not in call.body and "logprobs" not in settings
        assert settings["seed"] == sampling_seed(7, "toy", 5, 2, 0) and settings["stop_token_ids"] == list(renderer().stop_ids)
    reply = rollout.nodes[-1]
    assert (reply.source, reply.logprobs, reply.versions, reply.num_sampled) == ("frozen", None, None, 4)
    assert reply.token_ids[-4:].tolist() == [call.body["token_ids"][-1] + n for n in (1, 2, 3, 4)]
    assert not sampler.samples_from_live_policy and rollout.oldest_version is None


@pytest.mark.parametrize("tokenizer", [Neighbour(), None], ids=["another vocabulary", "not told"])
async def test_a_frozen_model_of_another_or_an_unknown_vocabulary_is_asked_in_words(tokenizer: Any) -> None:
    async with frozen(FakeModel(tokenizer=tokenizer)) as (sampler, server):
        await sampler.setup()
        rollout = rollout_of(sampler.environment)
        await sampler.play(rollout)
        (call,) = [call for call in server.calls if call.path == "/v1/chat/completions"]
        assert call.body["messages"] == [{"role": "user", "content": "q0"}]
        assert call.body["seed"] == sampling_seed(7, "toy", 5, 0, 0) and "stop_token_ids" not in call.body
        assert call.body["max_tokens"] == 4 and call.body["n"] == 1
    assert rollout.completion_text == "Q0" and rollout.nodes[-1].source == "frozen" and rollout.failure is None
    assert rollout.nodes[-1].token_ids[-1] == renderer().turn_end_id


async def test_the_shorter_of_the_models_window_and_the_trainers_row_bounds_a_rollout() -> None:
    for window, bound in ((WINDOW + 100, WINDOW), (WINDOW - 20, WINDOW - 20)):
        settings = SamplingConfig(max_tokens=63)
        async with frozen(FakeModel(tokenizer=renderer()), window=window, sampling=settings) as (sampler, _):
            await sampler.setup()
            rollout = rollout_of(sampler.environment)
            await sampler.play(rollout)
            assert sum(len(node.token_ids) for node in rollout.nodes) == bound
            assert rollout.is_truncated


async def test_a_model_whose_window_leaves_no_room_for_a_prompt_is_refused_at_set_up() -> None:
    async with frozen(FakeModel(tokenizer=renderer()), sampling=SamplingConfig(max_tokens=WINDOW)) as (sampler, _):
        with pytest.raises(ConfigError, match=rf"frozen model 'toy' at http.*sequences of {WINDOW} tokens, and `sampling.max_tokens`"):
            await sampler.setup()
        assert len(sampler.connected_pools) == 1, "it is closed with the others"


async def test_a_frozen_source_waits_for_places_of_its_own_and_the_wait_is_no_part_of_its_deadline() -> None:
    model = FakeModel(tokenizer=renderer())
    async with frozen(model, max_concurrency=1) as (sampler, server):
        await sampler.setup()
        model.wait_s = 0.3
        hurried = Sampler(sampler.environment, sampler.source, rollout_deadline_s=0.8)
        rollouts = [rollout_of(sampler.environment, member) for member in range(3)]
        await asyncio.gather(*map(hurried.play, rollouts))
        assert server.most_waiting == 1
    assert [rollout.failure for rollout in rollouts] == [None] * 3


async def test_a_server_that_fails_is_a_failed_rollout() -> None:
    async with frozen(FakeModel(tokenizer=renderer())) as (sampler, server):
        await sampler.setup()
        server.script.models = ("another",)  # type: ignore[attr-defined]
        rollout = rollout_of(sampler.environment)
        await sampler.play(rollout)
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.POLICY
    assert "does not serve 'toy'" in rollout.failure.message


async def test_only_the_policy_takes_the_engines_places_and_salts_by_its_version() -> None:
    pool, environment = ScriptedPool(version=3), ToyEnv(demonstration=lambda spec: "B")
    places = asyncio.Semaphore(1)
    policy = PolicySource(pool, renderer(), SamplingConfig(max_tokens=8), run_seed=0, window=ROW_LENGTH, places=places)
    demonstrations = DemonstrationSource(renderer(), environment.demonstration, ROW_LENGTH)
    async with places:
        shown = rollout_of(environment)
        await Sampler(environment, demonstrations, rollout_deadline_s=1.0).play(shown)
        assert shown.failure is None and shown.completion_text == "B" and shown.reward == 1.0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Sampler(environment, policy, rollout_deadline_s=1.0).play(rollout_of(environment)), 0.05)
    played = rollout_of(environment)
    await Sampler(environment, policy, rollout_deadline_s=1.0).play(played)
    assert [request.cache_salt for request in pool.endpoint.requests] == ["v3"]
    assert played.oldest_version == 3 and shown.oldest_version is None
    assert [s.connected_pools for s in (policy, demonstrations)] == [[], []]


async def test_a_key_that_is_not_set_is_a_config_error_before_anything_is_sent() -> None:
    config = FrozenModelConfig(name=MODEL, base_url=["http://127.0.0.1:9/v1"], api_key_var="NO_SUCH_KEY")
    source = FrozenSource(config, renderer(), SamplingConfig(), run_seed=0, window=64)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        await source.setup()


class TwoQuestions(ToyEnv):
    """Asks twice, and rewards each reply."""

    async def play(self, spec: TaskSpec, session: Session) -> Outcome:
        for _ in range(2):
            await session.ask([{"role": "user", "content": "?"}])
        return Outcome(reward=1.0, turn_rewards=[0.25, 0.75])


async def test_turns_are_rewarded_whoever_writes_them() -> None:
    environment = TwoQuestions(demonstration=lambda spec: ["A", "B"])
    shown = rollout_of(environment)
    await Sampler(environment, DemonstrationSource(renderer(), environment.demonstration, ROW_LENGTH), rollout_deadline_s=5.0).play(shown)
    asked = rollout_of(environment)
    async with frozen(FakeModel(tokenizer=renderer())) as (sampler, _):
        await sampler.setup()
        await Sampler(environment, sampler.source, rollout_deadline_s=5.0).play(asked)
    for rollout in (shown, asked):
        assert rollout.failure is None and rollout.num_turns == 2 and rollout.turn_rewards == [0.25, 0.75]
