"""`jaxrl.launch.preflight`: what a run needs of its chat template, and the runs that end there."""

import hashlib
import json
from pathlib import Path

import jax
import pytest

from jaxrl.config.env import FeedbackEnvConfig, ReverseTextEnvConfig, ToolsEnvConfig
from jaxrl.config.model import PolicyModelConfig
from jaxrl.config.orchestrator import OrchestratorConfig, TrainSectionConfig
from jaxrl.config.run import RunConfig
from jaxrl.config.trainer import TrainerConfig
from jaxrl.envs.build import build_environment
from jaxrl.errors import ConfigError
from jaxrl.inference.rendering.preflight import Needs
from jaxrl.launch import launch, training
from jaxrl.launch.preflight import check_template, template_needs
from tests.doctor.patients import ModelDir
from tests.e2e.runs import small_run
from tests.fakes import ToyEnv
from tests.inference.rendering.styles import renderer_of

ADDITION = {"dataset": "chain_sum", "num_tasks": 20}


def config_of(*envs: object) -> RunConfig:
    orchestrator = OrchestratorConfig(model=PolicyModelConfig(name="tiny"), train=TrainSectionConfig(env=list(envs)))
    return RunConfig(orchestrator=orchestrator, trainer=TrainerConfig(row_length=2048))


def needs_of(*envs: object) -> Needs:
    return template_needs(config_of(*envs), [build_environment(env) for env in envs], [])


def test_needs_are_those_of_the_environments() -> None:
    assert needs_of(ReverseTextEnvConfig()) == Needs()
    assert needs_of(ReverseTextEnvConfig(system_prompt="Reverse.")) == Needs(system=True)
    assert needs_of(FeedbackEnvConfig(**ADDITION)) == Needs(turns=True)
    assert needs_of(FeedbackEnvConfig(**ADDITION, history="keep")) == Needs()
    assert needs_of(ReverseTextEnvConfig(), ToolsEnvConfig(**ADDITION)) == Needs(turns=True, tools=True)
    assert needs_of(ToolsEnvConfig(**ADDITION, describe=False, history="keep")) == Needs(tools=True), "results are told all the same"
    assert template_needs(config_of(ReverseTextEnvConfig()), [ToyEnv(num_turns=2)], []) == Needs(turns=True), "who knows what it plays"


def test_a_template_that_does_not_do_for_the_run_is_the_configurations_error() -> None:
    fine, gemma = ReverseTextEnvConfig(), renderer_of("gemma")
    assert check_template(config_of(fine), gemma, [build_environment(fine)], []).problems == ()
    systemic = ReverseTextEnvConfig(system_prompt="Reverse.")
    with pytest.raises(ConfigError, match=r"of `orchestrator.model.name`='tiny' does not do for this run: .* there is no system role"):
        check_template(config_of(systemic), gemma, [build_environment(systemic)], [])


def test_a_run_ends_before_there_is_a_device_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = ModelDir(tmp_path)
    asks = "{{- '<|im_start|>assistant\\n' -}}"
    model_dir.edit_template(("{%- if add_generation_prompt -%}", f"{{%- if add_generation_prompt -%}}{asks}"))
    with pytest.raises(ConfigError, match="a prompt asks for a reply twice"):
        launch(small_run(tmp_path / "run", model_dir.override), devices=[])
    assert not (tmp_path / "run").exists()


def test_a_remark_is_one_line_of_the_log_and_the_hash_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir = ModelDir(tmp_path)
    model_dir.edit_template(before="{{- strftime_now('%d %b %Y') -}}")

    def end_here(*_: object) -> None:
        raise ConfigError("far enough")

    monkeypatch.setattr(training, "array_arm", end_here)
    with pytest.raises(ConfigError, match="far enough"):
        launch(small_run(tmp_path / "run", model_dir.override), devices=jax.devices()[:1])
    records = [json.loads(line) for line in (tmp_path / "run" / "logs" / "run.jsonl").read_text().splitlines()]
    (remark,) = [record for record in records if "template" in record["message"] and record["level"] == "warning"]
    assert remark["message"].startswith("the chat template writes today's date")
    template = (model_dir.path / "chat_template.jinja").read_text()
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["chat_template_sha256"] == hashlib.sha256(template.encode()).hexdigest()
