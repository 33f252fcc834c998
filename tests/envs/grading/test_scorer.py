"""The reward of a config in place of an environment's own scorer: what a rollout gets of it, and what is refused at start."""

import contextlib
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from jaxrl.config.env import EnvConfig, QuestionsEnvConfig, ReasoningGymEnvConfig, ReverseTextEnvConfig
from jaxrl.config.reward import MathVerifyRewardConfig, PythonRewardConfig
from jaxrl.envs.base import Environment
from jaxrl.envs.build import build_environment
from jaxrl.envs.play import play_rollout
from jaxrl.errors import ConfigError
from jaxrl.types import Boundary, Rollout
from tests.envs.policies import make_rollout, open_session, saying
from tests.fakes import ScriptedEndpoint

MISBEHAVING = "tests.envs.grading.misbehaving"


def reward_of(function: str, **options) -> PythonRewardConfig:  # type: ignore[no-untyped-def]
    return PythonRewardConfig(import_path=f"{MISBEHAVING}:{function}", **options)


async def played(env: Environment, endpoint: ScriptedEndpoint) -> Rollout:
    rollout = make_rollout(env.tasks()[0])
    await play_rollout(env, rollout, open_session(endpoint, rollout), 30.0)
    return rollout


def configs(tmp_path: Path, **options) -> list[EnvConfig]:  # type: ignore[no-untyped-def]
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "2 + 2 =", "answer": "4"}\n')
    return [
        ReverseTextEnvConfig(num_tasks=1, **options),
        QuestionsEnvConfig(path=str(path), split="all", **options),
        ReasoningGymEnvConfig(dataset="chain_sum", num_tasks=1, split="all", **options),
    ]


async def test_a_reward_takes_the_place_of_every_environments_own_scorer(tmp_path: Path) -> None:
    for config in configs(tmp_path, reward=reward_of("longer", kwargs={"than": 3})):
        with contextlib.closing(build_environment(config)) as env:
            rewards = [(await played(env, saying(text))).reward for text in ("long enough", "no")]
        assert rewards == [1.0, 0.0], config.type


async def test_what_goes_wrong_in_a_reward_function_is_a_missing_reward_that_names_it() -> None:
    messages = {
        "string": "returned 'yes' (str); expected a finite number, or None for a reply that it cannot score",
        "raise": "raised ZeroDivisionError: division by zero\n",
        "sleep": "was not done after 0.5 s, and its worker process was killed\n",
        "end": "ended its worker process, with exit code 3",
    }
    with contextlib.closing(build_environment(ReverseTextEnvConfig(num_tasks=1, reward=reward_of("act"), reward_deadline_s=0.5))) as env:
        for reply, message in messages.items():
            failed = await played(env, saying(reply))
            assert failed.reward is None and failed.failure is not None
            assert (failed.failure.boundary, failed.failure.type) == (Boundary.GRADER, "GraderError")
            assert failed.failure.message.startswith(f"env 'reverse_text': reward function '{MISBEHAVING}:act' {message}")
        unscored = await played(env, saying("none"))
    assert unscored.reward is None and unscored.failure is None


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (PythonRewardConfig(import_path="no.such:score"), "'no.such:score' cannot be loaded: ModuleNotFoundError: No module named 'no'"),
        (PythonRewardConfig(import_path="math:no_such"), "cannot be loaded: AttributeError: module 'math' has no attribute 'no_such'"),
        (PythonRewardConfig(import_path="math:pi"), "TypeError: 'pi' is no function, it is 3.14"),
        (reward_of("longer", kwargs={"then": 3}), r"'than'; it is called with \(spec, text, then=...\) and takes \(spec.*than.*\)"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_before_anything_is_played(reward: PythonRewardConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=f"env 'reverse_text': reward function .*{message}") as caught:
        build_environment(ReverseTextEnvConfig(num_tasks=1, reward=reward))
    assert ("importable" in str(caught.value)) == ("no.such" in message), "a hint that belongs to a module that is not found"
    assert "inspect.py" not in str(caught.value)


async def test_functions_beside_the_run_are_found_and_see_no_secret_but_those_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards.py").write_text("import os\ndef sees(spec, text):\n    return float(text in os.environ)\n")
    monkeypatch.chdir(tmp_path)
    for name in ("JUDGE_API_KEY", "WANDB_API_KEY", "PLAIN"):
        monkeypatch.setenv(name, "value")
    reward = PythonRewardConfig(import_path="my_rewards:sees", env_vars=["JUDGE_API_KEY"])
    with contextlib.closing(build_environment(ReverseTextEnvConfig(num_tasks=1, reward=reward))) as env:
        seen = {name: (await played(env, saying(name))).reward for name in ("JUDGE_API_KEY", "WANDB_API_KEY", "PLAIN")}
    assert seen == {"JUDGE_API_KEY": 1.0, "WANDB_API_KEY": 0.0, "PLAIN": 1.0}


def test_a_missing_package_for_maths_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxrl\[math\]'"):
        build_environment(ReverseTextEnvConfig(num_tasks=1, reward=MathVerifyRewardConfig()))


def test_a_dataset_has_one_scorer_and_answers_unless_the_reward_is_the_users_own() -> None:
    with pytest.raises(ValidationError, match="`reward` takes the place of `scorer`='dataset'"):
        ReasoningGymEnvConfig(dataset="chain_sum", scorer="dataset", reward=reward_of("act"))
    config = ReasoningGymEnvConfig(dataset="rush_hour", num_tasks=1, split="all", reward=reward_of("act"))
    assert build_environment(config).tasks()[0]["answer"] is None
    with pytest.raises(ConfigError, match="no single answer"):
        build_environment(config.model_copy(update={"reward": MathVerifyRewardConfig()}))
