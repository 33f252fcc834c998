"""The policy's opinion of the environment's own replies: which tokens are asked about, and what becomes of the numbers."""

import asyncio
import json
import logging

import numpy as np
import pytest

from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.base import Environment, TaskSpec
from jaxrl.envs.chat import ChatEnvironment, Episode
from jaxrl.envs.single_turn import SingleTurnEnvironment
from jaxrl.errors import EngineError
from jaxrl.evals import DemonstrationScorer, EnvEvalHarness, LivePolicy, score_rows
from jaxrl.evals.demonstrations import DemonstrationScore
from jaxrl.inference.pool import PolicyPool
from jaxrl.tasks import task_of
from tests.envs.policies import IM_END, RENDERER, ids_of
from tests.evals.worlds import asking
from tests.fakes import ScriptedEndpoint, ToyEnv

DEMONSTRATIONS = {"a": "4", "b": None, "c": "It is 16."}


class Ruler(ScriptedEndpoint):
    """Gives token `i` of a sequence the logprob -i / 8, and keeps the sequences that it was asked about."""

    def __init__(self) -> None:
        super().__init__(lambda request, version: [*ids_of("4"), IM_END])
        self.scored: list[list[int]] = []
        self.refused: tuple[int, ...] = ()

    async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        assert temperature == 1.0
        self.scored.append(token_ids.tolist())
        if len(self.scored) - 1 in self.refused:
            raise EngineError("no")
        return -np.arange(len(token_ids), dtype=np.float32) / 8


def sums(**demonstrations: str | None) -> SingleTurnEnvironment:
    def score(spec: TaskSpec, text: str) -> float:
        return float(text == spec["demonstration"])

    specs: list[TaskSpec] = [{"id": name, "demonstration": text} for name, text in demonstrations.items()]
    return SingleTurnEnvironment(
        "sums", specs, prompt=lambda spec: f"What is {spec['id']}?", score=score, system_prompt="Sums.",
        demonstration=lambda spec: spec["demonstration"],
    )  # fmt: skip


def harness(endpoint: ScriptedEndpoint, env: Environment, *, window: int = 128, asked: bool = True, **options: object) -> EnvEvalHarness:
    policy = LivePolicy(PolicyPool([endpoint], 0), RENDERER, run_seed=0, window=window)
    demonstrations = DemonstrationScorer(env, policy) if asked else None
    settings: dict = {"demonstrations": demonstrations, "should_probe": False} | options
    return EnvEvalHarness(env, policy, **settings)


async def scored(endpoint: ScriptedEndpoint, env: Environment) -> list[DemonstrationScore | None]:
    """Score the demonstrations of an environment in a window of 64 tokens."""
    scorer = DemonstrationScorer(env, LivePolicy(PolicyPool([endpoint], 0), RENDERER, run_seed=0, window=64))
    return list((await scorer.score({spec["id"]: task_of(env.name, spec) for spec in env.tasks()}, asyncio.Semaphore(1))).values())


def prompt_of(name: str) -> list[int]:
    messages = [{"role": "system", "content": "Sums."}, {"role": "user", "content": f"What is {name}?"}]
    return RENDERER.open_turn(None, messages).prompt_ids.tolist()


async def test_prompt_demonstration_and_stop_id_are_scored_and_the_mean_is_over_the_tokens_of_all_replies() -> None:
    endpoint = Ruler()
    result = await harness(endpoint, sums(**DEMONSTRATIONS)).run(asking(), step=3)
    expected = {name: [*prompt_of(name), *ids_of(text), IM_END] for name, text in DEMONSTRATIONS.items() if text}
    assert endpoint.scored == list(expected.values())
    replied = {name: range(len(prompt_of(name)), len(ids)) for name, ids in expected.items()}
    nlls = {name: sum(index / 8 for index in indices) for name, indices in replied.items()}
    assert [row["demonstration_nll"] for row in result.rows] == [nlls["a"], None, nlls["c"]]
    assert [row["demonstration_tokens"] for row in result.rows] == [len(replied["a"]), None, len(replied["c"])]
    mean = sum(nlls.values()) / sum(map(len, replied.values()))
    assert mean != pytest.approx(np.mean([nlls[name] / len(replied[name]) for name in nlls]))
    assert result.scores["demonstration_nll"] == pytest.approx(mean) and result.scores["n_demonstrations"] == 2
    assert score_rows([json.loads(json.dumps(row, allow_nan=False)) for row in result.rows], 1.0) == result.scores


async def test_the_policys_own_replies_and_their_scores_are_what_they_are_without() -> None:
    env = sums(**DEMONSTRATIONS)
    with_nll, without = [await harness(Ruler(), env, asked=asked).run(asking(), step=0) for asked in (True, False)]
    added = {"demonstration_nll", "demonstration_tokens"}
    assert [{k: v for k, v in row.items() if k not in added} for row in with_nll.rows] == without.rows
    assert with_nll.scores.keys() - without.scores.keys() == {"demonstration_nll", "n_demonstrations"}


async def test_demonstrations_are_rendered_once_and_scored_by_the_version_that_is_held_each_time() -> None:
    endpoint, played = Ruler(), []
    env = sums(a="4")
    render = env.demonstration
    env.demonstration = lambda spec: played.append(spec["id"]) or render(spec)
    pool = PolicyPool([endpoint], 0)
    versions = []
    score = pool.score

    async def watched(token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        update = asyncio.create_task(pool.update(pool.version + 1))
        await asyncio.sleep(0.01)
        versions.append(pool.version)
        assert not update.done()
        return await score(token_ids, temperature)

    pool.score = watched
    policy = LivePolicy(pool, RENDERER, run_seed=0, window=128)
    measured = EnvEvalHarness(env, policy, demonstrations=DemonstrationScorer(env, policy), should_probe=False)
    first = await measured.run(asking(), step=0)
    await pool.update(1)
    num_played = len(played)
    second = await measured.run(asking(), step=1)
    assert len(played) == num_played and endpoint.scored[0] == endpoint.scored[1]
    assert versions == [first.version, second.version] == [0, 1]


async def test_what_cannot_be_rendered_or_is_refused_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    endpoint = Ruler()
    endpoint.refused = (1,)
    env = sums(a="4", b="8", long="1 " * 300, c="16")
    with caplog.at_level(logging.WARNING):
        scores = await scored(endpoint, env)
    assert [score is not None for score in scores] == [True, False, False, True]
    assert "1 of 4 demonstrations cannot be scored" in caplog.text and "task 'long'" in caplog.text
    assert "1 demonstrations were not scored; the first one: no" in caplog.text


async def test_without_a_demonstration_there_is_no_score_but_a_word_about_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        result = await harness(Ruler(), sums(a=None)).run(asking(), step=0)
    assert "demonstration_nll" not in result.scores and result.rows[0]["demonstration_nll"] is None
    assert "no task of the evaluation has a demonstration" in caplog.text


async def test_no_more_demonstrations_are_scored_at_once_than_asked_for() -> None:
    running = most = 0

    class Slow(Ruler):
        async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1
            return await super().score(token_ids, temperature)

    env = sums(**{f"t{index}": str(index) for index in range(9)})
    await harness(Slow(), env, concurrency=3).run(asking(), step=0)
    assert most == 3


async def test_a_demonstration_of_which_a_limit_leaves_replies_unsaid_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Talk(ChatEnvironment):
        def reset(self, episode: Episode) -> str:
            return "What is 2 + 2?"

        def reply(self, episode: Episode) -> str:
            return "And then?"

        def score(self, episode: Episode) -> float:
            return 1.0

        def demonstration(self, spec: TaskSpec) -> list[str]:
            return ["4", "16"]

    endpoint, env = Ruler(), Talk("talk", [{"id": "t"}], budget=BudgetConfig(max_turns=1))
    with caplog.at_level(logging.WARNING):
        scores = await scored(endpoint, env)
    assert scores == [None] and endpoint.scored == []
    assert "task 't': it was over after 1 replies (max_turns)" in caplog.text


async def test_the_replies_of_several_turns_are_scored_in_one_sequence_each_after_all_that_was_said() -> None:
    endpoint = Ruler()
    env = ToyEnv(num_tasks=2, num_turns=2, demonstration=lambda spec: ["4", "16"] if spec["id"] == "toy-0" else ["4"])
    result = await harness(endpoint, env, window=256).run(asking(), step=0)
    first = RENDERER.open_turn(None, [{"role": "user", "content": "q0"}])
    state = RENDERER.close_turn(first, np.array([*ids_of("4"), IM_END], np.int32))
    second = RENDERER.open_turn(state, [{"role": "user", "content": "again 1"}]).prompt_ids.tolist()
    (scored,) = endpoint.scored
    assert scored == [*second, *ids_of("16"), IM_END]
    said = [*range(len(first.prompt_ids), len(first.prompt_ids) + 2), *range(len(second), len(scored))]
    assert [row["demonstration_tokens"] for row in result.rows] == [len(said), None], "one that ends too early is none"
    assert result.rows[0]["demonstration_nll"] == sum(index / 8 for index in said)
