"""OPD against servers on loopback: whose numbers a rollout gets, how many are asked for at once, and what becomes of bad ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from jaxrl.batching import rollout_to_samples
from jaxrl.config.algorithm import OPDConfig
from jaxrl.config.model import FrozenModelConfig
from jaxrl.errors import ConfigError, EngineError, RunFailedError
from jaxrl.inference.wire import COMPLETIONS_PATH, TOKENS_PATH
from jaxrl.monitors.ledger import Ledger
from jaxrl.orchestrator.algo import OPD, AlgorithmContext
from jaxrl.orchestrator.draws import Draw
from jaxrl.orchestrator.groups import OpenGroup
from jaxrl.orchestrator.metrics import StepTally
from jaxrl.orchestrator.sink import MAX_SCORING_HOOKS, Sink
from jaxrl.types import Boundary, Group, Rollout
from tests.builders import make_group, make_node, make_rollout
from tests.fakes import ScriptedPool, ToyEnv
from tests.inference.wire_server import MODEL, WINDOW, Answer, Call, FakeModel, Script, WireServer, logprob
from tests.orchestrator.wiring import make_env, make_run, renderer

NUM_SETUP_IDS = 2
"""What is scored at setup is shorter than any rollout."""


def opd(url: str, pool: ScriptedPool | None = None, *, window: int | None = None, **model: Any) -> OPD:
    """Return the algorithm with a teacher at `url`."""
    config = OPDConfig(teacher=FrozenModelConfig(**{"name": MODEL, "base_url": [url], "max_attempts": 1, "timeout_s": 10.0, **model}))
    return OPD(config, pool or ScriptedPool(), AlgorithmContext(env_name="toy", renderer=renderer(), window=window))


@asynccontextmanager
async def taught(script: Script, **settings: Any) -> AsyncIterator[tuple[WireServer, OPD]]:
    """Run a teacher and the algorithm that is set up with it."""
    async with WireServer(script).running() as server:
        algorithm = opd(server.base_url, **settings)
        try:
            await algorithm.setup()
            yield server, algorithm
        finally:
            await close(algorithm)


async def close(algorithm: OPD) -> None:
    for pool in algorithm.connected_pools:
        await pool.close()


def prompt_of(call: Call) -> list[int]:
    """Return the ids that a call asks to be scored; none of any other call."""
    return call.body.get({TOKENS_PATH: "token_ids", COMPLETIONS_PATH: "prompt"}.get(call.path, ""), [])


def bent(fault: Callable[[dict[str, Any]], None] | Answer, *, num_faults: int = 10**9) -> Script:
    """Return a teacher that is well at setup and then answers wrongly: with `fault`, or with what it makes of a good answer."""
    model, left = FakeModel(tokenizer=renderer()), [num_faults]

    def script(call: Call) -> Answer:
        if len(prompt_of(call)) <= NUM_SETUP_IDS or not left[0]:
            return model(call)
        left[0] -= 1
        if isinstance(fault, Answer):
            return fault
        answer = model(call)
        fault(answer.body)
        return answer

    return script


def forked_rollout(num_branches: int) -> Rollout:
    """Return a rollout of one question with `num_branches` replies to it, each a branch."""
    rollout = make_rollout(1.0, turns=(((20, 21, 22), (30, 31)),), with_samples=False)
    for branch in range(1, num_branches):
        rollout.nodes.append(make_node(0, [40 + branch, 50 + branch], num_sampled=2))
    rollout.samples = rollout_to_samples(rollout)
    return rollout


@pytest.mark.parametrize("has_tokens_route", [True, False], ids=["token route", "completions"])
async def test_every_branch_gets_the_logprob_of_each_of_its_own_ids_and_no_credit(has_tokens_route: bool) -> None:
    rollout = forked_rollout(2)
    async with taught(FakeModel(has_tokens_route=has_tokens_route, tokenizer=renderer()), window=WINDOW - 1) as (server, algorithm):
        num_before = len(server.calls)
        await algorithm.finalize_rollout(rollout)
        asked = sorted(prompt_of(call) for call in server.calls[num_before:])
        await algorithm.finalize_group([rollout])
    assert rollout.failure is None
    assert asked == [[20, 21, 22, 30, 31], [20, 21, 22, 41, 51]]
    for sample, ids in zip(rollout.samples, asked, strict=True):
        expected = np.float32([0.0, *(logprob(token_id, position) for position, token_id in enumerate(ids) if position)])
        np.testing.assert_array_equal(sample.ref_logprobs, expected)
        assert sample.ref_logprobs.dtype == np.float32 and sample.advantages is None
        assert sample.ref_kl_weights.tolist() == [0, 0, 0, 1, 1] and sample.rl_weights.tolist() == [0] * 5


async def test_an_answer_of_one_token_is_taught_too() -> None:
    rollout = make_rollout(1.0, turns=(((20,), (2,)),))
    async with taught(FakeModel(tokenizer=renderer())) as (_, algorithm):
        await algorithm.finalize_rollout(rollout)
        await algorithm.finalize_group([rollout])
    (sample,) = rollout.samples
    assert sample.ref_logprobs.tolist() == [0.0, logprob(2, 1)] and sample.ref_kl_weights.tolist() == [0.0, 1.0]


async def test_the_numbers_are_the_same_in_any_company_and_no_more_are_asked_for_at_once_than_the_teacher_allows() -> None:
    model = FakeModel(tokenizer=renderer())
    rollouts = [forked_rollout(num_branches) for num_branches in (30, 1, 7)]
    async with taught(model, max_concurrency=4) as (server, algorithm):
        model.wait_s = 0.05
        await asyncio.gather(*(algorithm.score_rollout(rollout) for rollout in rollouts))
        assert server.most_waiting == 4
        model.wait_s = 0.0
        alone = forked_rollout(30)
        for sample in reversed(alone.samples):
            sample.ref_logprobs = await algorithm.teacher.score(sample.token_ids)
    for sample, other in zip(rollouts[0].samples, alone.samples, strict=True):
        np.testing.assert_array_equal(sample.ref_logprobs, other.ref_logprobs)


async def test_waiting_for_a_place_with_the_teacher_is_not_charged_to_the_hook() -> None:
    model = FakeModel(tokenizer=renderer())
    sink = Sink(Ledger(), StepTally(), is_ordered=False, pre_batch_filters=[], max_consecutive_failures=99, on_change=lambda: None)
    async with taught(model, max_concurrency=2) as (_, algorithm):
        model.wait_s = 0.15
        many = opened(make_env(ScriptedPool(), algorithm=algorithm, rollout_deadline_s=0.45), 10, 0)
        await asyncio.gather(*(sink.add(many, rollout) for rollout in many.members))
    assert [rollout.failure for rollout in many.members] == [None] * 10


async def test_a_branch_that_cannot_be_scored_leaves_no_stream_and_gives_up_the_others() -> None:
    rollout = forked_rollout(8)

    def script(call: Call) -> Answer:
        if len(prompt_of(call)) <= NUM_SETUP_IDS:
            return FakeModel(tokenizer=renderer())(call)
        return Answer(400, {"error": {"message": "no"}}) if prompt_of(call)[-1] == 53 else Answer(200, {}, wait_s=5)

    async with taught(script) as (server, algorithm), asyncio.timeout(3):
        with pytest.raises(EngineError, match="status 400: no"):
            await algorithm.score_rollout(rollout)
        while server.num_closed_early < 7:
            await asyncio.sleep(0.01)
    assert all(sample.ref_logprobs is None for sample in rollout.samples)


def drop_a_logprob(answer: dict[str, Any]) -> None:
    answer["prompt_logprobs"].pop()


def score_another_id(answer: dict[str, Any]) -> None:
    answer["prompt_logprobs"][3] = {"7": {"logprob": -0.5}}


def say_nan(answer: dict[str, Any]) -> None:
    for entry in answer["prompt_logprobs"][3].values():
        entry["logprob"] = float("nan")


BAD_TEACHERS = [
    pytest.param(Answer(400, {"error": {"message": "bad prompt"}}), {}, "EngineError: .*status 400: bad prompt", id="400"),
    pytest.param(Answer(200, {}, wait_s=30), {"timeout_s": 0.3}, r"DeadlineError: .*no answer within 0.3 s", id="timeout"),
    pytest.param(drop_a_logprob, {}, r"EngineError: .*`prompt_logprobs` for \d+ tokens, expected \d+", id="one too few"),
    pytest.param(score_another_id, {}, "EngineError: .*at position 3 is for the ids 7, the token there is", id="another id"),
    pytest.param(say_nan, {}, "EngineError: .*at position 3 is nan, expected a finite number", id="NaN"),
]


@pytest.mark.parametrize(("fault", "model", "message"), BAD_TEACHERS)
async def test_a_bad_teacher_is_a_rollout_error_and_ends_the_run_when_the_budget_is_spent(fault: Any, model: dict, message: str) -> None:
    async with WireServer(bent(fault)).running() as server:
        run = make_run(
            envs=lambda pool: [make_env(pool, algorithm=opd(server.base_url, pool, **model))], async_level=1, max_consecutive_failures=4
        )
        with pytest.raises(RunFailedError, match=rf"4 rollouts in a row failed; .* at boundary 'algorithm': {message}"):
            await run.play()
    failed = [rollout for rollouts in run.monitors.rollouts.values() for rollout in rollouts if rollout.failure is not None]
    assert {rollout.failure.boundary for rollout in failed} <= {Boundary.ALGORITHM}
    assert run.batches == []


async def test_a_teacher_that_fails_now_and_then_costs_rollouts_and_not_the_run() -> None:
    async with WireServer(bent(say_nan, num_faults=3)).running() as server:
        run = make_run(envs=lambda pool: [make_env(pool, algorithm=opd(server.base_url, pool))], async_level=1, max_steps=2)
        await run.play()
        (teacher,) = run.envs[0].algorithm.connected_pools
        with pytest.raises(EngineError, match="client has been closed"):
            await teacher.score(np.arange(3, dtype=np.int32))
    assert run.bucket_total("errored") == 3
    assert len(run.batches) == 2
    micro_batch = run.batches[-1].micro_batches[0]
    trained = micro_batch.ref_kl_weights != 0
    assert trained.sum() > 0 and (micro_batch.ref_logprobs[trained] < 0).all() and micro_batch.advantages is None


class Unlike:
    """A tokenizer of as many tokens, one of which is another."""

    def encode(self, text: str, *, add_special_tokens: bool) -> np.ndarray:
        return renderer().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Any) -> str:
        return "".join("<other>" if token_id == 100 else renderer().decode([token_id]) for token_id in token_ids)


def refuses_high_ids(call: Call) -> Answer:
    if max(prompt_of(call), default=0) > 300:
        return Answer(400, {"error": {"message": f"Token id {max(prompt_of(call))} is out of vocabulary"}})
    return FakeModel()(call)


def no_scores(call: Call) -> Answer:
    answer = FakeModel()(call)
    if isinstance(answer.body, dict):
        answer.body.pop("prompt_logprobs", None)
    return answer


@pytest.mark.parametrize(
    ("script", "settings", "error", "message"),
    [
        pytest.param(
            FakeModel(tokenizer=Unlike()), {}, ConfigError,
            f"another vocabulary than the policy, .*: id 100 is {renderer().decode([100])!r} to the policy and '<other>' to the server",
            id="another vocabulary",
        ),
        pytest.param(refuses_high_ids, {}, EngineError, "Token id 319 is out of vocabulary", id="fewer tokens, and it does not tell"),
        pytest.param(FakeModel(), {"name": "other"}, EngineError, "does not serve 'other'; it serves 'toy'", id="another model"),
        pytest.param(FakeModel(key="sesame"), {}, EngineError, "the server wants a key", id="no key"),
        pytest.param(FakeModel(), {"api_key_var": "JAXRL_NO_SUCH_KEY"}, ConfigError, "JAXRL_NO_SUCH_KEY is not set", id="no variable"),
        pytest.param(no_scores, {}, EngineError, "it cannot score", id="no prompt logprobs"),
        pytest.param(FakeModel(), {"window": WINDOW}, ConfigError, r"some may have 65 \(64 to score, and one", id="too short a window"),
    ],
)  # fmt: skip
async def test_a_teacher_that_will_not_do_ends_the_run_before_the_first_rollout(
    script: Script, settings: dict, error: type[Exception], message: str
) -> None:
    async with WireServer(script).running() as server:
        run = make_run(envs=lambda pool: [make_env(pool, algorithm=opd(server.base_url, pool, **settings))])
        with pytest.raises(error, match=rf"env 'toy': `algo.teacher`: .*{message}"):
            await run.play()
        for teacher in run.envs[0].algorithm.connected_pools:
            with pytest.raises(EngineError, match="client has been closed"):
                await teacher.score(np.arange(3, dtype=np.int32))
    assert run.pool.endpoint.requests == [] and run.batches == []
    assert len(await run.pool.health()) == 1  # the policy's pool is left alone


async def test_a_stop_while_the_teacher_is_waited_for_ends_the_run_and_closes_the_pool() -> None:
    run = make_run(envs=lambda pool: [make_env(pool, algorithm=opd("http://127.0.0.1:1/v1", pool))])
    async with asyncio.timeout(10):
        playing = asyncio.create_task(run.play())
        while not run.envs[0].algorithm.connected_pools:
            await asyncio.sleep(0.01)
        run.orchestrator.request_stop()
        await playing
    (teacher,) = run.envs[0].algorithm.connected_pools
    with pytest.raises(EngineError, match="client has been closed"):
        await teacher.score(np.arange(3, dtype=np.int32))
    assert run.pool.endpoint.requests == []


async def test_a_stop_while_the_teacher_scores_gives_its_requests_up_and_ends_the_run() -> None:
    async with WireServer(bent(Answer(200, {}, wait_s=60))).running() as server, asyncio.timeout(10):
        run = make_run(envs=lambda pool: [make_env(pool, algorithm=opd(server.base_url, pool))], async_level=1)
        playing = asyncio.create_task(run.play())
        while server.num_waiting < 8:
            await asyncio.sleep(0.01)
        run.orchestrator.request_stop()
        await playing
        while server.num_closed_early < 8:
            await asyncio.sleep(0.01)
        (teacher,) = run.envs[0].algorithm.connected_pools
        with pytest.raises(EngineError, match="client has been closed"):
            await teacher.score(np.arange(3, dtype=np.int32))
    decided = [rollout.bucket for rollouts in run.monitors.rollouts.values() for rollout in rollouts]
    assert run.batches == [] and set(decided) == {"cancelled"}


async def test_a_teacher_whose_vocabulary_is_not_told_is_used_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with taught(FakeModel()) as (server, algorithm):
        await algorithm.score_rollout(forked_rollout(1))
        warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1 and server.base_url in warned[0] and "was not compared with the policy's" in warned[0]


def opened(env: Any, size: int, order: int) -> OpenGroup:
    """Return a group of which nothing has arrived, with rollouts that were played."""
    played = make_group([1.0] * size, env_name=env.name, draw_index=order)
    waiting = Group(played.id, played.task, order, size=size, version=0)
    return OpenGroup(order, Draw(env.name, played.task.spec, order), env, waiting, played.rollouts, opened_at_s=0.0)


async def test_a_thousand_rollouts_that_wait_for_a_stuck_teacher_hold_up_no_other_environment_and_cost_one_task_each() -> None:
    model, policy = FakeModel(tokenizer=renderer()), ScriptedPool()
    sink = Sink(Ledger(), StepTally(), is_ordered=False, pre_batch_filters=[], max_consecutive_failures=9, on_change=lambda: None)
    async with taught(model, max_concurrency=8) as (stuck, slow), taught(FakeModel(tokenizer=renderer())) as (_, quick):
        model.wait_s = 60.0
        many = opened(make_env(policy, ToyEnv("slow"), algorithm=slow), 1000, 0)
        few = opened(make_env(policy, ToyEnv("quick"), algorithm=quick), 4, 1)
        before = len(asyncio.all_tasks())
        waiting = [asyncio.create_task(sink.add(many, rollout)) for rollout in many.members]
        while stuck.most_waiting < 8:
            await asyncio.sleep(0.01)
        # One for each that waits, one for each branch that is scored, and those of the 8 connections.
        assert len(asyncio.all_tasks()) - before <= 1000 + MAX_SCORING_HOOKS + 3 * 8
        async with asyncio.timeout(5):
            await asyncio.gather(*(sink.add(few, rollout) for rollout in few.members))
        assert list(sink.finished) == [few] and all(rollout.samples[0].ref_logprobs is not None for rollout in few.members)
        assert stuck.most_waiting == 8
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
