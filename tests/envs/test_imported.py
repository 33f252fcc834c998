"""Environments of the user's own: what their factory is called with, and every way to get it wrong in words."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxrl.config.env import ExampleConfig, PythonEnvConfig
from jaxrl.config.load import load_config
from jaxrl.config.reward import PythonRewardConfig
from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.base import Environment, TaskSpec
from jaxrl.envs.build import build_environment
from jaxrl.envs.chat import ChatEnvironment
from jaxrl.envs.hooks import imported
from jaxrl.errors import ConfigError
from tests.envs.test_chat import SPEC, GuessANumber
from tests.fakes import ToyEnv

HERE = __name__


class Game(GuessANumber):
    """Takes its tasks from its arguments."""

    def __init__(self, name: str, *, numbers: Sequence[str] = ("7",), budget: BudgetConfig | None = None) -> None:
        super().__init__(name, [{"id": number, "number": number} for number in numbers], budget=budget)


def toy(name: str, num_tasks: int = 2) -> Environment:
    return ToyEnv(name, num_tasks=num_tasks)


def told(name: str, system_prompt: str | None, examples: Sequence[ExampleConfig], **rest: Any) -> Environment:
    return ToyEnv(name, num_tasks=1 + len(examples) + len(system_prompt or "") + len(rest))


def anything(**arguments: Any) -> Environment:
    return ToyEnv(arguments["name"], num_tasks=len(arguments))


def scoring(spec: TaskSpec, reply: str) -> float:
    return 1.0


def scoring_more(spec: TaskSpec, reply: str, **rest: Any) -> float:
    return 1.0


def misnamed(name: str) -> Environment:
    return ToyEnv("other")


def broken(name: str) -> Environment:
    raise KeyError("no such file")


def leaving(name: str) -> Environment:
    sys.exit(3)


def no_environment(name: str) -> object:
    return object()


class Empty(ChatEnvironment):
    def __init__(self, name: str) -> None:
        super().__init__(name, [SPEC])

    def tasks(self) -> Sequence[TaskSpec]:
        return []


class Unlistable(Empty):
    def tasks(self) -> Sequence[TaskSpec]:
        raise OSError("gone")


NUMBER = 7


def build(target: str, **settings: Any) -> Environment:
    return build_environment(PythonEnvConfig(import_path=f"{HERE}:{target}" if ":" not in target else target, name="mine", **settings))


def test_a_class_is_called_with_its_name_and_kwargs_and_the_budget_of_the_table() -> None:
    env = build("Game", kwargs={"numbers": ["3", "4"]}, budget=BudgetConfig(max_turns=2))
    assert isinstance(env, Game) and env.name == "mine" and [spec["id"] for spec in env.tasks()] == ["3", "4"]
    assert env._budget.max_turns == 2
    default = build("Game")
    assert isinstance(default, Game) and default._budget == PythonEnvConfig(import_path="a:b").budget


def test_a_function_that_takes_no_budget_is_called_without() -> None:
    assert len(build("toy").tasks()) == 2 and len(build("toy", kwargs={"num_tasks": 5}).tasks()) == 5


def test_settings_of_the_table_go_where_there_is_a_parameter_for_them() -> None:
    example = ExampleConfig(question="q", answer="a")
    assert len(build("told", system_prompt="four", examples=[example]).tasks()) == 1 + 1 + 4
    assert len(build("told").tasks()) == 1, "what is not set is told as it is, and no budget where none was asked for"
    assert len(build("anything").tasks()) == 1 and len(build("anything", system_prompt="x").tasks()) == 2


@pytest.mark.parametrize(
    ("setting", "value"),
    [("budget", BudgetConfig()), ("system_prompt", "Be brief."), ("examples", [ExampleConfig(question="q", answer="a")])],
)
def test_a_setting_without_a_place_to_go_is_an_error(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"env 'mine': `import_path`='{HERE}:toy' has no parameter `{setting}`"):
        build("toy", **{setting: value})


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        ("jaxrl_nowhere.envs:Game", {}, "cannot be imported: ModuleNotFoundError: .*; it must be importable from where the run is started"),
        ("Gamme", {}, "cannot be imported: AttributeError: module .* has no attribute 'Gamme'"),
        ("NUMBER", {}, "is a int; name a class or a function"),
        ("toy", {"kwargs": {"tasks": 3}}, r"called with \(name=..., tasks=...\) and raised TypeError: .* keyword argument 'tasks'"),
        ("toy", {"kwargs": {"name": "x"}}, "`kwargs` holds a `name`; set the environment's own `name`"),
        ("scoring", {}, r"is a function of \(spec, reply\), .* if it scores a reply, decorate it with `@single_turn\(tasks\)`"),
        ("scoring", {"system_prompt": "x"}, r"decorate it with `@single_turn\(tasks\)`"),
        ("scoring_more", {}, r"decorate it with `@single_turn\(tasks\)`"),
        ("broken", {}, r"raised KeyError: 'no such file' \(test_imported.py, line \d+, in broken\)"),
        ("leaving", {}, "raised SystemExit: 3"),
        ("no_environment", {}, "returned a object, which is no environment: it has no method `tasks`; derive it from"),
        ("misnamed", {}, "returned an environment called 'other'; call it what it is told, 'mine'"),
        ("Empty", {}, "env 'mine' has no tasks"),
        ("Unlistable", {}, "its tasks cannot be listed: OSError: gone"),
    ],
)
def test_whatever_is_wrong_is_an_error_of_the_configuration(target: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(target, **settings)


def test_a_run_may_refuse_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        "[orchestrator.model]\nname = 'models/tiny'\n[[orchestrator.train.env]]\ntype = 'python'\nimport_path = 'my_games:Game'\n"
    )
    assert load_config(tmp_path / "run.toml", []).orchestrator.train.env[0].type == "python"
    with pytest.raises(ConfigError, match=r"`orchestrator\.train\.env\.0\.import_path`.*`run\.allow_import_paths`=false refuses"):
        load_config(tmp_path / "run.toml", ["--run.allow_import_paths", "false"])


def test_a_reward_in_place_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="env 'mine': `reward` scores an answer, and an environment of type 'python' scores itself"):
        build("toy", reward=PythonRewardConfig(import_path="operator:eq"))


def test_a_module_beside_the_run_is_found_from_a_console_script_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_game.py").write_text("def make(name):\n    return name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert imported("my_own_game:make", "here")("x") == "x"
    assert sys.path[-1] == str(tmp_path)
