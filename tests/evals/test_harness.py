"""One row for every planned episode, whatever happens to it, from one version of the policy."""

import asyncio
import json

import numpy as np
import pytest

from jaxrl.evals import EvalResult, score_rows
from jaxrl.inference.endpoint import GenerateRequest, sampling_seed
from jaxrl.inference.pool import PolicyPool
from tests.evals.worlds import Sums, asking, harness, live, right_below_four
from tests.fakes import ScriptedEndpoint


async def asked(endpoint: ScriptedEndpoint, num_requests: int) -> None:
    """Wait until an evaluation that was started has come so far."""
    async with asyncio.timeout(10):
        while len(endpoint.requests) < num_requests:
            await asyncio.sleep(0.001)


async def test_each_planned_episode_has_one_row_in_plan_order_and_scores_follow_from_the_rows() -> None:
    slow_first = ScriptedEndpoint(right_below_four, latency=lambda r: 0.02 if "/0/0" in r.request_id else 0.0)
    result = await harness(Sums(), slow_first).run(asking(), step=5)
    assert [row["task_id"] for row in result.rows] == [f"s{a}" for a in range(6)]
    assert [row["reward"] for row in result.rows] == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert (result.env_name, result.step, result.version) == ("sums", 5, 0)
    assert result.scores["success_rate"] == pytest.approx(4 / 6)
    rows = [json.loads(json.dumps(row, allow_nan=False)) for row in result.rows]
    assert score_rows(rows, 1.0) == result.scores
    assert rows[3]["text"] == "6" and rows[3]["messages"][-1] == {"role": "assistant", "content": "6"}
    assert [node["parent"] for node in rows[3]["nodes"]] == [None, 0] and rows[3]["nodes"][1]["sampled"] is True
    assert rows[3]["completion_tokens"] == 2 and rows[3]["token_versions"] == [0] and rows[3]["turns"] == 1
    assert rows[3]["metrics"] == {"forks": 0.0, "sums/a": 3.0} and result.scores["metrics"]["sums/a"] == 2.5
    assert result.scores["mean_num_turns"] == 1.0 and result.flat_scores()["sums/a"] == 2.5


async def test_errors_timeouts_and_unscored_episodes_have_rows_with_no_reward() -> None:
    env = Sums(odd={1: "raises", 2: "hangs", 3: "unscored"})
    result = await harness(env, rollout_deadline_s=0.1).run(asking(), step=0)
    assert [row["status"] for row in result.rows] == ["ok", "error", "error", "unscored", "ok", "ok"]
    assert [row["reward"] for row in result.rows] == [1.0, None, None, None, 0.0, 0.0]
    assert [row["error"] and row["error"]["stage"] for row in result.rows] == [None, "env", "timeout", None, None, None]
    error = result.rows[1]["error"]
    assert (error["stage"], error["type"]) == ("env", "RuntimeError")
    assert error["message"].startswith("no such sum (worlds.py, line ") and error["message"].endswith(", in play)")
    assert result.scores["n_planned"] == 6 and result.scores["n_error"] == 2 and result.scores["n_scored"] == 3
    assert result.scores["success_rate"] == pytest.approx(1 / 3)


async def test_a_limit_plays_the_first_tasks() -> None:
    result = await harness(Sums()).run(asking(limit=2), step=0)
    assert [row["task_id"] for row in result.rows] == ["s0", "s1"]


async def test_no_more_episodes_run_at_once_than_asked_for() -> None:
    endpoint = ScriptedEndpoint(right_below_four, latency=lambda r: 0.002)
    running = []
    original = endpoint.latency

    def latency(request: GenerateRequest) -> float:
        running.append(endpoint.num_running)
        assert original is not None
        return original(request)

    endpoint.latency = latency
    await harness(Sums(12), endpoint, concurrency=3).run(asking(), step=0)
    assert max(running) == 3


async def test_progress_is_told_before_the_first_episode_and_after_each() -> None:
    told: list[tuple[int, int]] = []
    await harness(Sums(3), on_progress=lambda done, total: told.append((done, total))).run(asking(), step=0)
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


async def test_sampling_is_evaluations_own_and_seeds_are_of_a_scope_that_training_cannot_have() -> None:
    endpoint = ScriptedEndpoint(right_below_four)
    before = np.random.get_state()[1].copy()
    await harness(Sums(3), endpoint).run(asking(), step=0)
    await harness(Sums(3), endpoint).run(asking(), step=4)
    assert {request.sampling.temperature for request in endpoint.requests} == {0.0}
    seeds = [request.sampling.seed for request in endpoint.requests]
    expected = sorted(sampling_seed(11, "eval:sums", index, 0, 0) for index in range(3))
    assert sorted(seeds[:3]) == sorted(seeds[3:]) == expected
    assert sampling_seed(11, "sums", 0, 0, 0) not in seeds
    assert (np.random.get_state()[1] == before).all()


async def test_a_weight_update_waits_for_the_evaluation() -> None:
    endpoint = ScriptedEndpoint(right_below_four, latency=lambda r: 0.005)
    pool = PolicyPool([endpoint], 0)
    evaluation = asyncio.create_task(harness(Sums(12), policy=live(pool=pool), concurrency=2).run(asking(), step=0))
    await asked(endpoint, 1)
    await pool.update(1)
    result = await evaluation
    assert result.version == 0 and result.scores["n_other_version"] == 0
    assert all(row["token_versions"] == [0] for row in result.rows)


async def test_episodes_that_ran_on_a_newer_version_after_the_hold_are_counted() -> None:
    endpoint = ScriptedEndpoint(right_below_four, latency=lambda r: 0.02)
    pool = PolicyPool([endpoint], 0)
    evaluation = asyncio.create_task(harness(Sums(4), policy=live(pool=pool, hold_deadline_s=0.03), concurrency=1).run(asking(), step=0))
    await asked(endpoint, 1)
    await pool.update(1)
    result = await evaluation
    assert isinstance(result, EvalResult) and result.version == 0
    assert result.scores["n_other_version"] >= 1 and result.rows[-1]["token_versions"] == [1]


async def test_cancelling_an_evaluation_cancels_its_episodes_and_lets_updates_go() -> None:
    endpoint = ScriptedEndpoint(latency=lambda r: 60.0)
    pool = PolicyPool([endpoint], 0)
    evaluation = asyncio.create_task(harness(Sums(3), policy=live(pool=pool)).run(asking(), step=0))
    await asked(endpoint, 3)
    evaluation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await evaluation
    assert endpoint.num_cancelled == 3
    await asyncio.wait_for(pool.update(1), 1)
