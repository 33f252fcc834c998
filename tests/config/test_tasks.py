"""The configuration of task samplers and gates: what may be set, what is refused, and how files write it."""

import re
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import TypeAdapter, ValidationError

from jaxrl.config.dump import dump_toml
from jaxrl.config.load import load_config
from jaxrl.config.run import RunConfig
from jaxrl.config.tasks import (
    AdvantageRangeGateConfig,
    CurriculumTasksConfig,
    PoolsTasksConfig,
    PythonGateConfig,
    RewardRangeGateConfig,
    TasksConfig,
    gate_name,
)
from jaxrl.errors import ConfigError

ADAPTER: TypeAdapter = TypeAdapter(TasksConfig)
OWN_GATE = {"type": "python", "name": "mine", "import_path": "my.gates:keep", "kwargs": {"least": 3}}
GATES = [{"type": "advantage_range", "low": -0.1}, {"type": "reward_range", "low": 0.1, "high": 0.9}, OWN_GATE]
EVERY: list[dict[str, Any]] = [
    {"type": "sequential", "gates": GATES},
    {"type": "uniform", "cost": "service_spend"},
    {"type": "curriculum", "key": "group", "gamma": 0.8, "eps": 0.1, "signal": "variance", "signal_tolerance": 0.05, "gates": GATES[:1]},
    {"type": "pools", "pools": [{"name": "low", "max_score": 0.3, "weight": 2.0}, {"name": "rest", "weight": 0.5}], "failing_weight": 0.2},
    {"type": "python", "import_path": "my.samplers:Mine", "kwargs": {"a": {"b": [1, "x"]}}},
]


def run(tmp_path: Path, tasks: dict[str, Any], *overrides: str, more: str = "") -> RunConfig:
    """Load a run of one environment with a `tasks` table."""
    env = {"type": "reverse_text", "tasks": tasks}
    text = tomli_w.dumps({"orchestrator": {"model": {"name": "m"}, "train": {"env": [env]}}})
    (tmp_path / "run.toml").write_text(f"{more}\n{text}")
    return load_config(tmp_path / "run.toml", list(overrides))


@pytest.mark.parametrize("tasks", EVERY, ids=lambda tasks: tasks["type"])
def test_what_a_file_says_of_tasks_is_what_a_run_has_and_writes_again(tasks: dict[str, Any], tmp_path: Path) -> None:
    config = run(tmp_path, tasks)
    (env,) = config.orchestrator.train.env
    assert env.tasks == ADAPTER.validate_python(tasks)
    (tmp_path / "again.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "again.toml") == config


def test_a_sampler_is_chosen_and_set_from_the_command_line(tmp_path: Path) -> None:
    (env,) = run(tmp_path, {"type": "uniform"}, "--orchestrator.train.env.0.tasks.type", "curriculum").orchestrator.train.env
    assert (env.tasks.type, env.tasks.key, env.tasks.gamma, env.tasks.eps) == ("curriculum", "difficulty", 0.9, 0.05)
    (env,) = run(tmp_path, {"type": "pools"}, "--orchestrator.train.env.0.tasks.pools.0.weight", "0.75").orchestrator.train.env
    assert [(pool.name, pool.max_score, pool.weight) for pool in env.tasks.pools] == [
        ("hard", 0.2, 0.75), ("medium", 0.8, 1.0), ("easy", None, 0.1),
    ]  # fmt: skip


@pytest.mark.parametrize("tasks", [EVERY[4], {"type": "uniform", "gates": [OWN_GATE]}], ids=["sampler", "gate"])
def test_code_of_ones_own_is_refused_where_import_paths_are(tasks: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="refuses every import path"):
        run(tmp_path, tasks, more="[run]\nallow_import_paths = false")


def test_the_tables_that_the_document_shows_are_those_of_a_run(tmp_path: Path) -> None:
    document = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
    shown = []
    for block in re.findall(r"^```toml\n(.*?)^```", document, re.MULTILINE | re.DOTALL):
        (tmp_path / "run.toml").write_text(f'[orchestrator.model]\nname = "m"\n{block}')
        shown.append(load_config(tmp_path / "run.toml").orchestrator.train.env[0].tasks)
    assert [tasks.type for tasks in shown] == ["curriculum", "pools", "python", "uniform"]
    assert shown[0] == CurriculumTasksConfig() and shown[1] == PoolsTasksConfig(), "what it shows is what holds unless set"
    assert [gate_name(gate) for gate in shown[3].gates] == ["short", "advantage_range"]


def test_a_gate_is_called_by_its_type_and_a_function_by_its_name() -> None:
    assert gate_name(AdvantageRangeGateConfig()) == "advantage_range"
    assert gate_name(RewardRangeGateConfig(low=0, high=1)) == "reward_range"
    assert gate_name(PythonGateConfig(name="mine", import_path="a:b")) == "mine"


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"type": "uniform", "gates": [GATES[0], GATES[0]]}, "two of `gates` are called 'advantage_range'"),
        ({"type": "uniform", "gates": [OWN_GATE, {**OWN_GATE, "import_path": "my.gates:other"}]}, "two of `gates` are called 'mine'"),
        ({"type": "uniform", "gates": [GATES[1], {**OWN_GATE, "name": "reward_range"}]}, "two of `gates` are called 'reward_range'"),
        ({"type": "uniform", "gates": [{"type": "reward_range", "low": 1.0, "high": 0.0}]}, "`low`=1 exceeds `high`=0"),
        ({"type": "uniform", "gates": [{"type": "advantage_range", "low": 0.1}]}, "`low`=0.1 exceeds `high`=0"),
        ({"type": "uniform", "cost": ""}, "at least 1 character"),
        ({"type": "uniform", "key": "id"}, "Extra inputs"),
        ({"type": "curriculum", "key": "tier"}, "'difficulty', 'group' or 'id'"),
        ({"type": "curriculum", "gamma": 0.0}, "greater than 0"),
        ({"type": "curriculum", "gamma": 1.5}, "less than or equal to 1"),
        ({"type": "curriculum", "eps": -0.1}, "greater than or equal to 0"),
        ({"type": "curriculum", "signal_tolerance": 0.1}, "`signal_tolerance` is for `signal`='variance'"),
        ({"type": "curriculum", "cost_weight": 1.0}, "Extra inputs"),
        ({"type": "pools", "pools": []}, "at least one pool"),
        ({"type": "pools", "pools": [{"name": "failing", "weight": 1.0}]}, "none 'unseen' or 'failing'"),
        ({"type": "pools", "pools": [{"name": "a", "weight": 1.0}, {"name": "b", "weight": 1.0}]}, "takes all that are left"),
        ({"type": "pools", "pools": [{"name": "a", "max_score": 1.0, "weight": 1.0}]}, "takes all that are left"),
        (
            {"type": "pools", "pools": [{"name": n, "max_score": 0.5, "weight": 1.0} for n in "ab"] + [{"name": "c", "weight": 1.0}]},
            "ascend",
        ),
        ({"type": "pools", "pools": [{"name": "a", "weight": 0.0}]}, "nothing would be drawn"),
        ({"type": "pools", "unseen_weight": 0.0}, "greater than 0"),
        ({"type": "python", "import_path": "samplers.Mine"}, "match pattern"),
        ({"type": "random"}, "sequential"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_words(tasks: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ADAPTER.validate_python(tasks)
