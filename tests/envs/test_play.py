"""Each way a rollout can break ends at its boundary, with no reward, and never as an exception."""

import asyncio
import copy
import decimal
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from jaxrl.envs.base import Outcome, Session, TaskSpec
from jaxrl.envs.play import play_rollout
from jaxrl.errors import DeadlineError, EngineError, EnvError, GraderError, PromptTooLongError
from jaxrl.types import Boundary, Rollout, Task
from tests.envs.policies import make_rollout, open_session, saying
from tests.fakes import ScriptedEndpoint

QUESTION = [{"role": "user", "content": "hi"}]


class Playing:
    """An environment with one task that is played by a given coroutine function."""

    name = "toy"

    def __init__(self, play: Callable[[Session], Awaitable[Any]]) -> None:
        self._play = play
        self.is_torn_down = False

    def tasks(self) -> list[TaskSpec]:
        return [{"id": "t"}]

    async def play(self, spec: TaskSpec, session: Session) -> Outcome:
        try:
            return await self._play(session)
        finally:
            await asyncio.sleep(0)
            self.is_torn_down = True


def answering(**outcome: Any) -> Playing:
    async def play(session: Session) -> Outcome:
        await session.ask(QUESTION)
        return Outcome(**outcome)

    return Playing(play)


def raising(error: BaseException) -> Playing:
    async def play(session: Session) -> Outcome:
        await session.ask(QUESTION)
        raise error

    return Playing(play)


async def played(env: Playing, *, deadline_s: float = 10.0, endpoint: ScriptedEndpoint | None = None, window: int = 512) -> Rollout:
    rollout = make_rollout()
    await play_rollout(env, rollout, open_session(endpoint or saying("1"), rollout, window=window), deadline_s)
    assert env.is_torn_down
    return rollout


@pytest.mark.parametrize("reward", [1, 0.5, -2.0, 0, np.float32(0.25), np.int64(3)])
async def test_a_finite_number_is_a_reward(reward: float) -> None:
    rollout = await played(answering(reward=reward, metrics={"n": 2}, info={"k": "v"}, stop_reason="max_turns", is_truncated=True))
    assert rollout.reward == float(reward) and type(rollout.reward) is float and rollout.failure is None
    assert rollout.metrics["n"] == 2.0 and rollout.info == {"k": "v"} and rollout.is_truncated and rollout.stop_reason == "max_turns"
    assert rollout.duration_s > 0


async def test_no_reward_is_unscored_and_no_failure() -> None:
    rollout = await played(answering(reward=None))
    assert rollout.reward is None and rollout.failure is None and rollout.stop_reason == "done"


BAD_REWARDS = [
    float("nan"), float("inf"), -float("inf"), np.float64("nan"), True, False, np.True_, "1.0", "", b"1", [1.0], (1.0,), {"reward": 1.0},
    np.array(1.0), np.array([1.0]), 1j, 10**400, decimal.Decimal("1"), object(),
]  # fmt: skip


@pytest.mark.parametrize("reward", BAD_REWARDS, ids=[f"{type(r).__name__}-{i}" for i, r in enumerate(BAD_REWARDS)])
async def test_anything_else_is_a_failure_of_the_grader_and_no_reward(reward: object) -> None:
    rollout = await played(answering(reward=reward))
    assert rollout.reward is None and rollout.failure is not None
    assert rollout.failure.boundary is Boundary.GRADER and "must be a finite number or None" in rollout.failure.message


async def test_a_grader_error_shows_the_reward_functions_own_exception() -> None:
    error = GraderError("wrapped")
    error.__cause__ = ZeroDivisionError("division by zero")
    rollout = await played(raising(error))
    assert rollout.failure is not None
    assert (rollout.failure.boundary, rollout.failure.type, rollout.failure.message) == (
        Boundary.GRADER,
        "ZeroDivisionError",
        "division by zero",
    )


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyError("answer"), TimeoutError("the env's own socket"), SystemExit(0)])
async def test_any_other_exception_is_the_environments(error: BaseException) -> None:
    rollout = await played(raising(error))
    assert rollout.failure is not None
    assert rollout.failure.boundary is Boundary.ENV and rollout.failure.type == type(error).__name__ and rollout.reward is None


async def test_what_nobody_raised_on_purpose_is_shown_with_the_line_that_raised_it_and_what_somebody_did_without() -> None:
    rollout = await played(raising(ValueError("odd")))
    assert rollout.failure is not None
    assert re.fullmatch(r"odd \(test_play\.py, line \d+, in .+\)", rollout.failure.message)
    assert rollout.traceback.startswith("Traceback") and rollout.traceback.endswith("ValueError: odd\n")

    async def play(session: Session) -> Outcome:
        return json.loads("{")

    in_a_library = await played(Playing(play))
    assert in_a_library.failure is not None and ", in play)" in in_a_library.failure.message
    meant = await played(raising(EnvError("no such task")))
    assert meant.failure is not None and (meant.failure.message, meant.traceback) == ("no such task", "")


@pytest.mark.parametrize("error", [EngineError("lost"), DeadlineError("request"), PromptTooLongError("long"), ConnectionError("reset")])
async def test_whatever_the_endpoint_raises_is_the_policys(error: Exception) -> None:
    endpoint = saying("1")
    endpoint.failure = error
    rollout = await played(answering(reward=1.0), endpoint=endpoint)
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.POLICY and rollout.reward is None


async def test_a_prompt_that_is_too_long_is_the_policys_and_says_truncated() -> None:
    rollout = await played(answering(reward=1.0), window=4)
    assert rollout.failure is not None and rollout.failure.type == "PromptTooLongError"
    assert rollout.stop_reason == "prompt_too_long" and rollout.is_truncated


async def test_a_rollout_past_its_deadline_fails_at_timeout_after_its_own_cleanup() -> None:
    async def hang(session: Session) -> Outcome:
        await asyncio.sleep(60)
        raise AssertionError

    rollout = await played(Playing(hang), deadline_s=0.02)
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.TIMEOUT
    assert "task 't' took more than 0.02 s" in rollout.failure.message


async def test_a_hanging_policy_is_a_timeout_and_its_request_is_cancelled() -> None:
    endpoint = ScriptedEndpoint(latency=lambda _: 60.0)
    rollout = await played(answering(reward=1.0), endpoint=endpoint, deadline_s=0.02)
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.TIMEOUT and endpoint.num_cancelled == 1


@pytest.mark.parametrize("then", ["returns", "raises"])
async def test_an_environment_that_swallows_the_cancellation_is_still_a_timeout(then: str) -> None:
    async def stubborn(session: Session) -> Outcome:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if then == "raises":
                raise RuntimeError("lost in clean-up") from None
        return Outcome(reward=1.0)

    rollout = await played(Playing(stubborn), deadline_s=0.02)
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.TIMEOUT and rollout.reward is None


async def test_cancellation_from_outside_passes_through_after_the_cleanup() -> None:
    env = raising(RuntimeError)
    rollout = make_rollout()
    task = asyncio.create_task(play_rollout(env, rollout, open_session(ScriptedEndpoint(latency=lambda _: 60.0), rollout), 60.0))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert env.is_torn_down and rollout.reward is None


async def test_a_cancelled_coroutine_inside_the_environment_is_the_environments_failure() -> None:
    rollout = await played(raising(asyncio.CancelledError()))
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.ENV


@pytest.mark.parametrize("outcome", [None, 1.0, {"reward": 1.0}])
async def test_an_environment_must_return_an_outcome(outcome: object) -> None:
    async def play(session: Session) -> Any:
        return outcome

    rollout = await played(Playing(play))
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.ENV and "`Outcome`" in rollout.failure.message


async def test_a_metric_that_is_no_number_is_the_environments_failure_and_leaves_no_reward() -> None:
    rollout = await played(answering(reward=1.0, metrics={"good": 1.0, "bad": float("nan")}))
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.ENV and "'bad'" in rollout.failure.message
    assert rollout.reward is None and "good" not in rollout.metrics


async def test_a_reply_cut_by_the_token_limit_marks_the_rollout_as_truncated() -> None:
    endless = ScriptedEndpoint(lambda request, version: [70, 71, 72])
    assert (await played(answering(reward=1.0), endpoint=endless)).is_truncated
    assert not (await played(answering(reward=1.0))).is_truncated


@pytest.mark.parametrize("rewards", [[0.5], (np.float32(0.5),)])
async def test_a_reward_for_each_turn_is_kept_beside_the_rollouts_own(rewards: Sequence[float]) -> None:
    rollout = await played(answering(reward=1.0, turn_rewards=rewards))
    assert rollout.failure is None and rollout.reward == 1.0 and rollout.turn_rewards == [0.5] and type(rollout.turn_rewards[0]) is float
    unscored = await played(answering(reward=None, turn_rewards=rewards))
    assert (unscored.reward, unscored.failure, unscored.turn_rewards) == (None, None, [0.5]), "they are not added up to a reward"
    assert (await played(answering(reward=1.0))).turn_rewards is None


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([], "needs one reward for each of the 1 replies of the policy .*, got 0"),
        ([0.5, 0.5], "needs one reward for each of the 1 replies of the policy .*, got 2"),
        ([float("nan")], "the reward of turn 0 must be a finite number, got nan of type float"),
        ([None], "the reward of turn 0 must be a finite number, got None"),
        (["1"], "the reward of turn 0 must be a finite number, got '1' of type str"),
    ],
)
async def test_rewards_of_turns_that_are_no_numbers_or_too_few_are_a_failure_of_the_grader(rewards: list, message: str) -> None:
    rollout = await played(answering(reward=1.0, turn_rewards=rewards))
    assert rollout.failure is not None and rollout.failure.boundary is Boundary.GRADER and re.search(message, rollout.failure.message)
    assert rollout.reward is None and rollout.turn_rewards is None and len(rollout.nodes) == 2, "the turns are kept for the log"


async def test_what_an_environment_writes_into_its_task_is_gone_when_the_next_rollout_of_it_begins() -> None:
    seen: list[TaskSpec] = []

    class Careless(Playing):
        async def play(self, spec: TaskSpec, session: Session) -> Outcome:
            seen.append(copy.deepcopy(spec))
            spec["board"][0].clear()
            spec.clear()
            return Outcome(reward=1.0)

    task = Task("toy", "t", {"id": "t", "board": [[1, 2]]})
    for member in range(2):
        rollout = Rollout(task, "toy/0", member, 0)
        await play_rollout(Careless(asyncio.sleep), rollout, open_session(saying("1"), rollout), 10.0)
        assert rollout.failure is None and rollout.task.spec == {"id": "t", "board": [[1, 2]]}
    assert seen == [task.spec] * 2
