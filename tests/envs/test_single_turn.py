"""An environment from two functions."""

import asyncio
import threading

import pytest

from jaxrl.config.env import ExampleConfig
from jaxrl.envs.play import play_rollout
from jaxrl.envs.single_turn import SingleTurnEnvironment
from jaxrl.errors import ConfigError
from jaxrl.types import Boundary, Rollout
from tests.envs.policies import make_rollout, open_session, saying
from tests.fakes import ScriptedEndpoint

TASKS = [{"id": "hi", "text": "hi"}, {"id": "ho", "text": "ho"}]


def shout(**options) -> SingleTurnEnvironment:  # type: ignore[no-untyped-def]
    settings = {"prompt": lambda spec: f"Shout: {spec['text']}", "score": lambda spec, text: float(text == spec["text"].upper())}
    return SingleTurnEnvironment("shout", TASKS, **(settings | options))


async def played(env: SingleTurnEnvironment, endpoint: ScriptedEndpoint) -> Rollout:
    rollout = make_rollout(TASKS[0])
    await play_rollout(env, rollout, open_session(endpoint, rollout), 10.0)
    return rollout


async def test_the_question_is_asked_once_and_the_reply_is_scored() -> None:
    good, bad = await played(shout(), saying("HI")), await played(shout(), saying("hi"))
    assert (good.reward, bad.reward) == (1.0, 0.0) and good.num_turns == 1 and good.stop_reason == "done"
    assert [node.content for node in good.nodes] == ["Shout: hi", "HI"]


async def test_a_system_prompt_comes_first() -> None:
    rollout = await played(shout(system_prompt="Be loud."), saying("HI"))
    assert (rollout.nodes[0].role, rollout.nodes[0].content) == ("system", "Be loud.")


async def test_a_score_may_be_a_coroutine_function() -> None:
    async def judge(spec: dict, text: str) -> float:
        await asyncio.sleep(0)
        return 0.25

    assert (await played(shout(score=judge), saying("HI"))).reward == 0.25


async def test_a_plain_score_runs_off_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def score(spec: dict, text: str) -> float:
        threads.append(threading.current_thread())
        return 1.0

    await played(shout(score=score), saying("HI"))
    assert threads[0] is not threading.main_thread()


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_score_that_raises_fails_at_the_grader_with_its_own_exception(is_async: bool) -> None:
    def broken(spec: dict, text: str) -> float:
        raise ZeroDivisionError("no terms")

    async def broken_too(spec: dict, text: str) -> float:
        return broken(spec, text)

    failure = (await played(shout(score=broken_too if is_async else broken), saying("HI"))).failure
    assert failure is not None and (failure.boundary, failure.type) == (Boundary.GRADER, "ZeroDivisionError")
    assert failure.message.startswith("no terms (test_single_turn.py, line ")


async def test_a_prompt_that_raises_is_the_environments_failure() -> None:
    failure = (await played(shout(prompt=lambda spec: spec["nothing"]), saying("HI"))).failure
    assert failure is not None and failure.boundary is Boundary.ENV and failure.type == "KeyError"


async def test_a_score_of_none_is_unscored() -> None:
    rollout = await played(shout(score=lambda spec, text: None), saying("HI"))
    assert rollout.reward is None and rollout.failure is None


@pytest.mark.parametrize(("require_stop", "reward"), [(True, 0.0), (False, 1.0)])
async def test_a_reply_that_was_cut_is_worth_nothing_only_if_a_stop_is_required(require_stop: bool, reward: float) -> None:
    endless = ScriptedEndpoint(lambda request, version: [70, 71])
    rollout = await played(shout(score=lambda spec, text: 1.0, require_stop=require_stop), endless)
    assert rollout.reward == reward and rollout.is_truncated and rollout.stop_reason == "max_tokens"


@pytest.mark.parametrize("tasks", [[], [{"text": "no id"}], [{"id": "a"}, {"id": "a"}]])
def test_tasks_need_ids_of_their_own(tasks: list) -> None:
    with pytest.raises(ConfigError, match="shout"):
        SingleTurnEnvironment("shout", tasks, prompt=str, score=lambda spec, text: 0.0)


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(0)])
async def test_a_score_that_raises_what_no_future_can_hold_or_what_ends_programs_fails_at_the_grader(error: BaseException) -> None:
    def broken(spec: dict, text: str) -> float:
        raise error

    failure = (await played(shout(score=broken), saying("HI"))).failure
    assert failure is not None and (failure.boundary, failure.type) == (Boundary.GRADER, type(error).__name__)


async def test_scores_that_never_return_fail_at_their_deadline_and_take_no_thread_from_anybody_else() -> None:
    never = threading.Event()
    env = shout(score=lambda spec, text: never.wait() or 1.0)
    # More than the event loop's own pool has threads.
    rollouts = [make_rollout(TASKS[0], member=member) for member in range(40)]
    try:
        async with asyncio.timeout(10.0):
            await asyncio.gather(*(play_rollout(env, r, open_session(saying("HI"), r), 0.5) for r in rollouts))
            assert {r.failure and r.failure.boundary for r in rollouts} == {Boundary.TIMEOUT}
            assert (await played(shout(), saying("HI"))).reward == 1.0
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == "score"), "none keeps the process from ending"
    finally:
        never.set()


async def test_a_plain_score_that_is_not_there_at_its_deadline_is_a_missing_reward() -> None:
    never = threading.Event()
    try:
        failure = (await played(shout(score=lambda spec, text: never.wait() or 1.0, score_deadline_s=0.1), saying("HI"))).failure
        assert failure is not None and failure.boundary is Boundary.GRADER
        assert failure.message == "the score was not there after 0.1 s; its thread cannot be killed and goes on"
    finally:
        never.set()


async def test_another_scorer_takes_the_place_of_the_first_and_what_each_holds_is_given_back() -> None:
    given_back: list[str] = []
    env = shout(close=lambda: given_back.append("first"))
    other = env.scored_by(lambda spec, text: 0.5, lambda: given_back.append("second"))
    assert given_back == ["first"] and (await played(other, saying("HI"))).reward == 0.5
    other.close()
    assert given_back == ["first", "second"]


async def test_examples_stand_as_turns_before_the_question_and_are_never_asked() -> None:
    shown = [ExampleConfig(question="Shout: ho", answer="HO")]
    env = shout(system_prompt="Be loud.", examples=shown)
    assert [spec["id"] for spec in env.tasks()] == ["hi"]
    rollout = await played(env, saying("HI"))
    assert [node.content for node in rollout.nodes] == ["Be loud.", "Shout: ho", "HO", "Shout: hi", "HI"]
    assert [node.sampled for node in rollout.nodes] == [False, False, False, False, True]


def test_an_environment_whose_every_task_is_an_example_is_refused() -> None:
    shown = [ExampleConfig(question=f"Shout: {text}", answer=text.upper()) for text in ("hi", "ho")]
    with pytest.raises(ConfigError, match="each of its 2 tasks is one of `examples`"):
        shout(examples=shown)
