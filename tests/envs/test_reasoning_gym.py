"""Questions of reasoning_gym: which there are, which split they are in, and what a reply is worth."""

import contextlib
import json
import subprocess
import sys

import pytest

from jaxrl.config.env import ReasoningGymEnvConfig, TierConfig
from jaxrl.envs.play import play_rollout
from jaxrl.envs.reasoning_gym import reasoning_gym_environment
from jaxrl.errors import ConfigError
from tests.envs.policies import make_rollout, open_session, saying
from tests.fakes import ScriptedEndpoint

EASY = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def sums(**options) -> ReasoningGymEnvConfig:  # type: ignore[no-untyped-def]
    return ReasoningGymEnvConfig(**({"dataset": "chain_sum", "parameters": EASY, "num_tasks": 300, "split": "all"} | options))


def questions(config: ReasoningGymEnvConfig) -> set[str]:
    return {spec["question"] for spec in reasoning_gym_environment(config).tasks()}


def test_specs_hold_question_answer_and_tier_as_json_with_distinct_ids_and_texts() -> None:
    specs = reasoning_gym_environment(sums(dataset="chain_sum")).tasks()
    assert json.loads(json.dumps(specs)) == specs
    assert len({s["id"] for s in specs}) == len({s["question"] for s in specs}) == len(specs) < 300  # equal questions were merged
    assert {s["difficulty"] for s in specs} == {"all"}
    left, right = specs[0]["question"].rpartition("problem: ")[2].rstrip(" =").replace("- ", "-").replace("+ ", "+"), specs[0]["answer"]
    assert sum(int(term) for term in left.split()) == int(right)


@pytest.mark.parametrize("heldout_frac", [0.0, 0.1, 0.5])
def test_train_and_heldout_part_the_questions_whatever_the_seed(heldout_frac: float) -> None:
    train = questions(sums(split="train", heldout_frac=heldout_frac))
    everything = questions(sums(heldout_frac=heldout_frac))
    if heldout_frac == 0:
        assert train == everything
        return
    heldout = questions(sums(split="heldout", heldout_frac=heldout_frac))
    assert train | heldout == everything and not train & heldout
    assert len(heldout) / len(everything) == pytest.approx(heldout_frac, abs=0.08)
    assert not train & questions(sums(split="heldout", heldout_frac=heldout_frac, seed=17, num_tasks=900))


def test_each_tier_varies_the_parameters_and_names_the_difficulty() -> None:
    tiers = [TierConfig(name="two", parameters={"max_terms": 2}), TierConfig(name="three", parameters={"min_terms": 3})]
    specs = reasoning_gym_environment(sums(tiers=tiers, num_tasks=40)).tasks()
    num_terms = {
        tier: {len(s["question"].rpartition(": ")[2].split()) // 2 for s in specs if s["difficulty"] == tier} for tier in ("two", "three")
    }
    assert num_terms == {"two": {2}, "three": {3}}
    with pytest.raises(ConfigError, match="two `tiers` have one name"):
        reasoning_gym_environment(sums(tiers=[tiers[0], tiers[0]]))


def test_a_question_of_two_tiers_belongs_to_the_first() -> None:
    tiers = [TierConfig(name="a"), TierConfig(name="b")]
    assert {s["difficulty"] for s in reasoning_gym_environment(sums(tiers=tiers, num_tasks=20)).tasks()} == {"a"}


async def rewards_of(config: ReasoningGymEnvConfig, *endpoints: ScriptedEndpoint, index: int = 0) -> list[float | None]:
    rewards = []
    with contextlib.closing(reasoning_gym_environment(config)) as env:
        for endpoint in endpoints:
            rollout = make_rollout(env.tasks()[index])
            await play_rollout(env, rollout, open_session(endpoint, rollout), 60.0)
            assert rollout.failure is None
            rewards.append(rollout.reward)
    return rewards


async def test_the_datasets_own_scorer_may_give_part_credit() -> None:
    spec = reasoning_gym_environment(sums()).tasks()[5]
    right, wordy = f"<think>so</think>{spec['answer']}", f"it is {spec['answer']}"
    assert await rewards_of(sums(), saying(right), saying(wordy), index=5) == [1.0, 0.0]
    part = pytest.approx(len(spec["answer"]) / len(wordy))
    assert await rewards_of(sums(scorer="dataset"), saying(right), saying(wordy), index=5) == [1.0, part]


@pytest.mark.parametrize(("require_stop", "reward"), [(True, 0.0), (False, 1.0)])
async def test_a_right_answer_that_was_cut_counts_only_if_no_stop_is_required(require_stop: bool, reward: float) -> None:
    answer = reasoning_gym_environment(sums()).tasks()[0]["answer"]
    from tests.envs.policies import ids_of

    cut = ScriptedEndpoint(lambda request, version: ids_of(answer))
    assert await rewards_of(sums(require_stop=require_stop), cut) == [reward]


def test_an_unknown_dataset_names_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"`dataset`='chain_sums' is not in reasoning_gym; did you mean 'chain_sum'"):
        reasoning_gym_environment(sums(dataset="chain_sums"))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"max_term": 3}, r"has no parameter 'max_term'; did you mean 'max_terms'"),
        ({"seed": 3}, r"'seed' is set by the environment's own `seed`"),
        ({"size": 3}, r"'size' is set by the environment's own `num_tasks`"),
        ({"min_terms": 9, "max_terms": 2}, r"refuses the parameters .*max_terms must be >= min_terms"),
        ({"min_terms": "two"}, r"refuses the parameters .*'two'"),
        ({"allow_negation": "x", "zzz": 1}, r"has no parameter 'zzz'; known: \['allow_negation'"),
    ],
)
def test_a_wrong_parameter_is_a_config_error_that_names_it(parameters: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reasoning_gym_environment(sums(parameters=parameters))


def test_a_dataset_without_single_answers_needs_its_own_scorer() -> None:
    with pytest.raises(ConfigError, match="use `scorer`='dataset'"):
        reasoning_gym_environment(sums(dataset="rush_hour", parameters={}, num_tasks=1))
    specs = reasoning_gym_environment(sums(dataset="rush_hour", parameters={}, num_tasks=1, scorer="dataset")).tasks()
    assert specs[0]["answer"] is None


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="no question of dataset 'chain_sum' is in split 'heldout'"):
        reasoning_gym_environment(sums(split="heldout", heldout_frac=0.0))


def test_the_package_is_imported_only_when_such_an_environment_is_built() -> None:
    code = "import sys, jaxrl.envs.build, jaxrl.evals; print(sorted({'reasoning_gym', 'transformers', 'jax', 'chex'} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match="pip install reasoning-gym"):
        reasoning_gym_environment(sums())
