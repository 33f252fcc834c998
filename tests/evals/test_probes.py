"""Whether an evaluation can be repeated is checked, not assumed."""

import asyncio
import itertools
import json
import logging

import pytest

from jaxrl.config.env import SamplingConfig
from jaxrl.envs.base import Outcome, Session, TaskSpec
from jaxrl.evals import EvalResult
from jaxrl.evals.observation import FirstObservation, WatchedSession, observation_text, prompt_sha
from jaxrl.evals.plan import plan_episodes
from jaxrl.evals.probes import spread_tasks
from jaxrl.inference.endpoint import GenerateRequest
from tests.builders import make_rollout
from tests.evals.worlds import Coin, Sums, asking, harness, right_below_four
from tests.fakes import ScriptedEndpoint


class IgnoresSeed(Sums):
    """Accepts a seed and deals another question at each play."""

    def __init__(self) -> None:
        super().__init__(5)
        self._deal = itertools.count()

    def question(self, spec: TaskSpec) -> str:
        return f"{next(self._deal)} + 1 ="


class IgnoresIndex(Sums):
    """Asks the same whatever the task."""

    def question(self, spec: TaskSpec) -> str:
        return "1 + 1 ="


async def probed(env: Sums, caplog: pytest.LogCaptureFixture | None = None, **options: object) -> tuple[EvalResult, dict[str, list]]:
    """Evaluate with probes, and return what each kind of probe found."""
    result = await harness(env, should_probe=True, **options).run(asking())
    found: dict[str, list] = {}
    for probe in result.scores["probes"]:
        found.setdefault(probe["kind"], []).append(probe["passed"])
    return result, found


async def test_a_world_that_repeats_itself_is_reproducible_and_its_probes_cost_no_reply(caplog: pytest.LogCaptureFixture) -> None:
    env, endpoint = Sums(9), ScriptedEndpoint(right_below_four)
    with caplog.at_level(logging.WARNING):
        result = await harness(env, endpoint, should_probe=True, concurrency=1).run(asking())
    assert result.scores["reproducible"] is True
    assert [(probe["kind"], probe["tasks"], probe["passed"]) for probe in result.scores["probes"]] == [
        *(("same_task", [task], True) for task in ("s0", "s4", "s8")),
        ("different_tasks", ["s0", "s4", "s8"], True),
    ]
    assert len(endpoint.requests) == 9 and len(env.played) == 9 + 6
    assert env.num_open == 0 and env.most_open == 1, "a probe cleans up, and needs one session of a server at a time"
    assert caplog.text == ""


async def test_a_world_that_ignores_its_seed_is_not_reproducible_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result, found = await probed(IgnoresSeed())
    assert result.scores["reproducible"] is False and found["same_task"] == [False] * 3
    assert "the same task began differently when it was played again" in caplog.text
    assert "0 + 1 =" in caplog.text and "1 + 1 =" in caplog.text, "the warning says what differed"


async def test_a_world_that_ignores_the_task_is_found_out_by_the_probe_of_different_tasks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result, found = await probed(IgnoresIndex())
    assert found == {"same_task": [True, True, True], "different_tasks": [False]} and result.scores["reproducible"] is True
    assert result.scores["different_tasks"] is False and result.flat_scores()["different_tasks"] == 0.0
    assert "different tasks begin alike" in caplog.text


async def test_a_world_that_breaks_or_never_asks_is_neither_reproducible_nor_not() -> None:
    class Silent(Sums):
        async def play(self, spec: TaskSpec, session: Session) -> Outcome:
            return Outcome(reward=1.0)

    result, found = await probed(Silent())
    assert result.scores["reproducible"] is None and found == {"same_task": [None] * 3, "different_tasks": [None]}
    assert result.scores["different_tasks"] is None and "different_tasks" not in result.flat_scores()
    assert result.scores["probes"][0]["detail"] == "the environment asked the policy nothing"
    result, found = await probed(Sums(odd={0: "raises"}))
    assert result.scores["reproducible"] is None and found["same_task"] == [None, True, True]
    assert result.scores["probes"][0]["detail"].startswith("RuntimeError: no such sum")
    result, found = await probed(Sums(1, odd={0: "hangs"}), rollout_deadline_s=0.05)
    assert found == {"same_task": [None]} and "DeadlineError" in result.scores["probes"][0]["detail"]


async def test_a_name_of_the_play_within_json_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    class Names(Sums):
        plays = 0

        def question(self, spec: TaskSpec) -> str:
            self.plays += 1
            return json.dumps({"board": spec["a"], "episode_id": self.plays})

    result, _ = await probed(Names(), policy=Mute())
    assert result.scores["reproducible"] is True
    result, _ = await probed(Names(), policy=Mute(), volatile_keys=())
    assert result.scores["reproducible"] is False


class Mute(Coin):
    """Says nothing to whatever it is asked."""

    async def answer(self, prompt, seed):  # type: ignore[no-untyped-def]
        from jaxrl.envs.words import WordsReply

        return WordsReply("")


async def test_an_environment_that_swallows_the_end_of_its_play_is_given_up() -> None:
    class Stubborn(Sums):
        async def play(self, spec: TaskSpec, session: Session) -> Outcome:
            try:
                return await super().play(spec, session)
            except asyncio.CancelledError:
                return Outcome(reward=None)

    result, found = await probed(Stubborn(2))
    assert result.scores["reproducible"] is True and found["same_task"] == [True, True]


async def test_the_probe_of_the_policy_plays_one_task_twice_at_temperature_zero() -> None:
    endpoint = ScriptedEndpoint(right_below_four)
    config = asking(limit=2, sampling=SamplingConfig(temperature=1.0, max_tokens=16))
    result = await harness(Sums(), endpoint, should_probe_policy=True, concurrency=1).run(config)
    assert result.scores["probes"] == [{"kind": "policy", "tasks": ["s0"], "passed": True, "detail": ""}]
    assert [request.sampling.temperature for request in endpoint.requests] == [0.0, 0.0, 1.0, 1.0]
    assert len({request.sampling.seed for request in endpoint.requests[:3]}) == 1


async def test_a_policy_that_changes_its_mind_is_not_reproducible(caplog: pytest.LogCaptureFixture) -> None:
    said = itertools.count(5)

    def reply(request: GenerateRequest, version: int) -> list[int]:
        return [65 + next(said), 2]

    with caplog.at_level(logging.WARNING):
        result = await harness(Sums(2), ScriptedEndpoint(reply), should_probe_policy=True).run(asking())
    assert result.scores["reproducible"] is False
    assert "the policy answered the same task differently at temperature 0" in caplog.text


async def test_probes_are_made_once_for_a_list_of_tasks_and_not_at_all_if_not_asked_for() -> None:
    env = Sums(3)
    measured = harness(env, should_probe=True)
    first = await measured.run(asking(), step=0)
    second = await measured.run(asking(), step=1)
    assert len(env.played) == 3 + 3 + 6 and second.scores["probes"] == first.scores["probes"]
    assert "reproducible" not in (await harness(Sums(3)).run(asking())).scores


@pytest.mark.parametrize(("num_tasks", "expected"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (4, [0, 2, 3]), (100, [0, 50, 99])])
def test_probed_tasks_are_spread_over_the_plan_each_with_its_first_seed(num_tasks: int, expected: list[int]) -> None:
    plan = plan_episodes(Sums(num_tasks), asking(seeds=(3, 1)).eval_parameters)
    assert [(episode.index, episode.task.spec["seed"]) for episode in spread_tasks(plan)] == [(index, 3) for index in expected]


async def test_a_row_has_the_hash_of_what_was_asked_even_if_nobody_answered() -> None:
    policy = Coin()
    policy.failing = {"1 + 1 ="}
    asked_twice = [await harness(Sums(3), policy=policy).run(asking()) for _ in range(2)]
    shas = [[row["observation_sha"] for row in result.rows] for result in asked_twice]
    assert shas[0] == shas[1] and len(set(shas[0])) == 3 and None not in shas[0]
    assert [row["prompt_sha"] is None for row in asked_twice[0].rows] == [False, True, False]


async def test_the_hash_of_a_prompt_is_of_its_tokens_and_gives_away_what_the_template_adds() -> None:
    plain, dated = make_rollout(turns=(((1, 2), (3, 4)),)), make_rollout(turns=(((9, 1, 2), (3, 4)),))
    assert prompt_sha(plain) == prompt_sha(make_rollout(turns=(((1, 2), (7,)), ((5,), (6,)))))
    assert prompt_sha(plain) != prompt_sha(dated)
    assert prompt_sha(make_rollout(turns=())) is None


def test_the_first_question_counts_tools_too_and_only_the_first() -> None:
    first = FirstObservation()
    tool = {"type": "function", "function": {"name": "look"}}
    first.note([{"role": "user", "content": "hi"}], [tool])
    first.note([{"role": "user", "content": "again"}], [])
    assert first.shown == {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    assert observation_text(first.shown) != observation_text({"messages": first.shown["messages"]})


async def test_a_watched_session_is_otherwise_the_one_inside() -> None:
    class Inner:
        extra = 7

        async def ask(self, messages, *, tools=()):  # type: ignore[no-untyped-def]
            return messages[0]["content"].upper()

        def fork(self) -> "Inner":
            return self

        restart = fork

    first = FirstObservation()
    session = WatchedSession(Inner(), first)
    assert session.extra == 7
    assert await session.restart().fork().ask([{"role": "user", "content": "hi"}]) == "HI"
    assert first.shown == {"messages": [{"role": "user", "content": "hi"}]}


async def test_what_was_asked_first_is_kept_as_it_was_asked() -> None:
    first, message = FirstObservation(), {"role": "user", "content": [{"type": "text", "text": "1 + 1 ="}]}
    first.note([message], [])
    message["content"].append({"type": "text", "text": "2"})  # type: ignore[attr-defined]
    assert first.shown == {"messages": [{"role": "user", "content": [{"type": "text", "text": "1 + 1 ="}]}]}


async def test_different_tasks_may_begin_alike_if_not_all_of_them_do_and_one_that_breaks_the_second_time_counts_with_its_first() -> None:
    class Twins(Sums):
        def question(self, spec: TaskSpec) -> str:
            return "2 + 2 =" if spec["a"] == 2 else "1 + 1 ="

    result, found = await probed(Twins(4), policy=Coin())
    assert found == {"same_task": [True] * 3, "different_tasks": [True]} and result.scores["different_tasks"] is True

    class Fragile(Sums):
        def question(self, spec: TaskSpec) -> str:
            if [played["a"] for played in self.played].count(0) == 2 and spec["a"] == 0:
                raise ConnectionError("no second game")
            return super().question(spec)

    _, found = await probed(Fragile(2), policy=Coin())
    assert found == {"same_task": [None, True], "different_tasks": [True]}
