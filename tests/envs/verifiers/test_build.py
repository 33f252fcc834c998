"""`type = "verifiers"`: from a table of the configuration to a taskset; without the package, which continuous integration does not have."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from jaxrl.config.env import EnvConfig, VerifiersEnvConfig
from jaxrl.config.load import load_config
from jaxrl.config.run import RunConfig
from jaxrl.envs.build import build_environment
from jaxrl.envs.verifiers.package import spec_of
from jaxrl.errors import ConfigError

SUMS = Path(__file__).parents[3] / "configs" / "verifiers.toml"


def config(**more: Any) -> VerifiersEnvConfig:
    return TypeAdapter(EnvConfig).validate_python({"type": "verifiers", "taskset": "sums", **more})


def test_without_the_package_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=r"env 'mine', taskset 'sums': .*needs the package `verifiers`.*pip install 'jaxrl\[verifiers\]'"):
        build_environment(config(name="mine"))


@pytest.mark.parametrize(("more", "words"), [
    ({"system_prompt": "Be brief."}, "whose taskset words the prompts; leave it out"),
    ({"examples": [{"question": "q", "answer": "a"}]}, "whose taskset words the prompts; leave it out"),
    ({"taskset_args": {"id": "other"}}, "`taskset_args` holds an `id`; set `taskset`"),
    ({"harness_args": {"id": "other"}}, "`harness_args` holds an `id`; set `harness`"),
])  # fmt: skip
def test_a_setting_that_has_no_place_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(**more)


def test_a_run_that_allows_no_import_paths_refuses_a_taskset_and_a_harness() -> None:
    assert load_config(SUMS, (), RunConfig).orchestrator.train.env[0].type == "verifiers"
    with pytest.raises(ConfigError) as refused:
        load_config(SUMS, ["--run.allow_import_paths=false"], RunConfig)
    for key in ("orchestrator.train.env.0.taskset`='chain_sums'", "orchestrator.train.env.0.harness`='one_question'"):
        assert key in str(refused.value)


class Data:
    """The data of a task as verifiers gives it out."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def model_dump(self, *, mode: str, exclude_defaults: bool, exclude: set[str]) -> dict[str, Any]:
        assert mode == "json" and exclude_defaults
        return {name: value for name, value in self._fields.items() if name not in exclude}


@pytest.mark.parametrize(("fields", "marks"), [
    ({"question": "2 + 2 ="}, {}),
    ({"difficulty": 3, "group": "sums"}, {"difficulty": 3, "group": "sums"}),
    ({"difficulty": True, "group": ["a"]}, {}),
    ({"difficulty": float("nan")}, {}),
])  # fmt: skip
def test_a_task_is_its_key_its_place_its_data_and_the_marks_that_a_curriculum_reads(fields: dict[str, Any], marks: dict[str, Any]) -> None:
    spec = spec_of(SimpleNamespace(key="k", data=Data(idx=4, id="row-9", **fields)), 4)
    assert spec == {"id": "k", "index": 4, **marks, "data": {"id": "row-9", **fields}}
