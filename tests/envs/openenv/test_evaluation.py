"""What the evaluation harness makes of OpenEnv servers that misbehave: rows, scores, warnings."""

import logging
import re
from collections import Counter
from typing import Any

import pytest

from jaxrl.config.env import SamplingConfig
from jaxrl.config.evals import EvalConfig, EvalParameters
from jaxrl.envs.openenv.environment import OpenEnvEnvironment
from jaxrl.evals import EnvEvalHarness, EvalResult, LivePolicy
from jaxrl.inference.endpoint import GenerateRequest
from jaxrl.inference.pool import PolicyPool
from tests.envs.openenv.stub import StubServer, World
from tests.envs.openenv.test_environment import built
from tests.envs.policies import IM_END, RENDERER, ids_of
from tests.fakes import ScriptedEndpoint


def obedient(request: GenerateRequest, version: int) -> list[int]:
    """Say the number that is asked for."""
    said = re.search(r"Say (\d+)", RENDERER.decode(request.token_ids))
    assert said is not None
    return [*ids_of(said[1]), IM_END]


async def measured(world: World, *, probes: bool = False, concurrency: int = 4, **parameters: Any) -> EvalResult:
    """Evaluate on a server of some world, with a policy that is always right if it is asked for its task's number."""
    with StubServer(world) as server:
        env = built(server, split="test")
        assert isinstance(env, OpenEnvEnvironment)
        policy = LivePolicy(PolicyPool([ScriptedEndpoint(obedient)], 0), RENDERER, run_seed=0, window=256)
        harness = EnvEvalHarness(env, policy, concurrency=concurrency, should_probe=probes, rollout_deadline_s=30.0)
        sampling = SamplingConfig(temperature=0.0, max_tokens=16)
        result = await harness.run(EvalConfig(dataset="stub", eval_parameters=EvalParameters(sampling=sampling, **parameters)))
        assert world.sessions == 0, "no session is left"
        return result


def probed(result: EvalResult, kind: str) -> list[bool | None]:
    return [probe["passed"] for probe in result.scores["probes"] if probe["kind"] == kind]


async def test_a_server_that_keeps_its_contract_is_reproducible_and_each_seed_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    world = World(splits={"test": 3})
    with caplog.at_level(logging.WARNING):
        result = await measured(world, probes=True, seeds=(4, 9), concurrency=1)
    assert (result.scores["reproducible"], result.scores["success_rate"], caplog.text) == (True, 1.0, "")
    assert probed(result, "same_task") == [True] * 3 and probed(result, "different_tasks") == [True]
    assert [(row["index"], row["seed"], row["split"]) for row in result.rows] == [
        (index, seed, "test") for index in range(3) for seed in (4, 9)
    ]
    assert world.resets[-6:] == [{"split": "test", "index": index, "seed": seed} for index in range(3) for seed in (4, 9)]
    assert not any("session_wait_s" in str(row) for row in result.rows), "what a clock said is no part of a row"


async def test_a_server_that_ignores_its_seed_is_not_reproducible_and_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = await measured(World(splits={"test": 3}, ignores_seed=True), probes=True)
    assert result.scores["reproducible"] is False and probed(result, "same_task") == [False] * 3
    assert "the same task began differently when it was played again" in caplog.text and "chance" in caplog.text


async def test_a_server_that_ignores_its_index_is_found_out_and_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = await measured(World(splits={"test": 3}, ignores_index=True), probes=True)
    assert probed(result, "different_tasks") == [False] and probed(result, "same_task") == [True] * 3
    assert "different tasks begin alike" in caplog.text


async def test_a_server_that_dies_after_10_episodes_leaves_10_scored_and_the_rest_as_errors_of_the_environment() -> None:
    result = await measured(World(splits={"test": 13}, dies_after=10), concurrency=1)
    assert [row["status"] for row in result.rows] == ["ok"] * 10 + ["error"] * 3
    assert [(row["error"]["stage"], row["reward"]) for row in result.rows[10:]] == [("env", None)] * 3
    assert "the server ended the session" in result.rows[10]["error"]["message"]
    assert "no session can be opened" in result.rows[12]["error"]["message"]
    scores = result.scores
    assert (scores["n_planned"], scores["n_scored"], scores["n_error"]) == (13, 10, 3)
    assert (scores["success_rate"], scores["mean_reward"]) == (1.0, 1.0), "what was not played is no failure"
    assert scores["success_rate_strict"] == pytest.approx(10 / 13)


async def test_a_server_that_gives_no_reward_is_unscored_and_never_0() -> None:
    result = await measured(World(splits={"test": 4}, gives_reward=False))
    assert [(row["status"], row["reward"], row["error"]) for row in result.rows] == [("unscored", None, None)] * 4
    scores = result.scores
    assert (scores["n_scored"], scores["n_error"]) == (0, 0)
    assert not {"success_rate", "mean_reward"} & scores.keys(), "a mean over nothing is absent"


async def test_a_server_at_capacity_is_waited_for_and_all_of_the_plan_is_played() -> None:
    world = World(splits={"test": 12}, capacity=2)
    result = await measured(world, concurrency=8)
    assert Counter(row["status"] for row in result.rows) == {"ok": 12} and result.scores["success_rate"] == 1.0
    assert world.most_sessions == 2 and world.refusals > 0
