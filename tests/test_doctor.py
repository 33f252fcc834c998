"""The doctor: every check on a run that is well and on one that is not, and what the command prints and returns."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import jax
import pytest

from jaxrl import doctor, launch, models
from jaxrl.config.run import RunConfig
from jaxrl.config.trainer import MeshConfig
from jaxrl.models.transformer import Params
from jaxrl.tasks import UniformSampler
from tests.e2e.runs import ROOT, SMALL, small_arguments, small_run

MODEL = ROOT / "configs/quickstart/start_model"


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor takes every device of the process; the small run is made for one."""

    def build_mesh(config: MeshConfig, devices: object = None) -> jax.sharding.Mesh:
        return models.mesh.build_mesh(config, jax.devices()[:1])

    monkeypatch.setattr(models, "build_mesh", build_mesh)
    monkeypatch.setattr(launch, "build_mesh", build_mesh)


def config(*overrides: str) -> RunConfig:
    """Return the small run."""
    return small_run(Path("unused"), *overrides)


def diagnose(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run the command; return its exit code and what it printed."""
    code = doctor.main(["--config", str(ROOT / "configs/quickstart.toml"), *SMALL, *arguments])
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err
    return code, shown.out + shown.err


def test_checks_that_are_good_are_one_line_each_and_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = diagnose(capsys, "--check=config", "--check=model", "--check=tokenizer", "--check=budgets", "--check=memory")
    assert code == 0
    lines = text.splitlines()
    assert [line.split()[:2] for line in lines] == [["ok", name] for name in ("config", "model", "tokenizer", "budgets", "memory")]
    assert "200 steps of 32 rollouts in groups of 8" in lines[0]
    assert "656,448 parameters" in lines[1]
    assert "'<|im_end|>'" in lines[2]
    assert "+ reply 32 =" in lines[3]
    # 656,448 parameters: 16 bytes each to train and 4 for each version; 32 slots of 64 columns, 3 layers of 2 heads of 32, keys and values.
    assert "training 10.0 MiB + 2 policy versions of 2.5 MiB + key-value cache 3.0 MiB = 18.0 MiB" in lines[4]


def test_a_configuration_that_does_not_load_is_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = diagnose(capsys, "--trainer.row=3")
    assert code == 2
    assert "unknown key `trainer.row`" in text


def test_an_unknown_check_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        diagnose(capsys, "--check=everything")
    assert caught.value.code == 2
    assert "everything" in capsys.readouterr().err


def test_every_default_check_exists_and_resume_alone_must_be_asked_for() -> None:
    assert [name for name in doctor.CHECKS if name not in doctor.DEFAULT_CHECKS] == ["resume"]


def test_a_bad_check_is_code_1_and_the_others_still_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-1000])
    code, text = diagnose(capsys, f"--orchestrator.model.name={model}", "--check=model", "--check=tokenizer")
    assert code == 1
    failed, good = text.splitlines()
    assert failed.startswith("FAIL model") and "model.safetensors" in failed
    assert good.startswith("ok   tokenizer")


def test_a_tokenizer_without_a_chat_template_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    (model / "chat_template.jinja").unlink()
    code, text = diagnose(capsys, f"--orchestrator.model.name={model}", "--check=tokenizer")
    assert code == 1
    assert "chat template" in text


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--inference.max_model_len=10", "--orchestrator.sampling.max_tokens=4"), "prompts do not fit; raise `inference.max_model_len`"),
        (("--inference.max_model_len=40",), "replies will be cut at the window"),
        (("--trainer.row_length=40", "--inference.max_model_len=64"), "long rollouts will be dropped; raise `trainer.row_length`"),
    ],
)
@pytest.mark.filterwarnings("ignore:`inference.max_model_len`=64 is longer than `trainer.row_length`:UserWarning")
def test_budgets_that_do_not_hold_a_rollout_are_found_with_the_number_to_set(overrides: tuple[str, ...], said: str) -> None:
    finding = doctor.check_budgets(config(*overrides))
    assert not finding.is_good
    assert said in finding.text


def test_what_does_not_fit_into_memory_is_found_before_anything_is_loaded() -> None:
    finding = doctor.check_memory(config("--inference.num_slots=100_000_000", "--orchestrator.max_async_level=2"))
    assert not finding.is_good
    assert "4 policy versions" in finding.text and "lower `inference.num_slots`" in finding.text


def perturbed(params: Params) -> Params:
    """Return a copy with one weight of one kernel changed."""
    kernel = params["layers"]["mlp"]["down_proj"]["kernel"].at[1, 7, 3].add(5.0)
    return {**params, "layers": {**params["layers"], "mlp": {**params["layers"]["mlp"], "down_proj": {"kernel": kernel}}}}


def test_parity_is_good_for_equal_weights_and_found_bad_when_one_weight_of_the_engine_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config()
    renderer, _, _ = launch.build_worlds(settings)
    with launch.array_arm(settings, renderer, models.build_mesh(settings.trainer.mesh), lambda *_: None) as arm:
        # Building one takes seconds: both checks look at this one.
        monkeypatch.setattr(launch, "array_arm", lambda *_: contextlib.nullcontext(arm))
        good = doctor.check_parity(settings)
        arm.device.run(arm.store.publish, 1, perturbed(arm.state.params), kind="publish")
        arm.engine.load(arm.store.get(1), version=1)
        bad = doctor.check_parity(settings)
    assert good.is_good, good.text
    assert not bad.is_good
    assert "engine and trainer disagree" in bad.text


@pytest.mark.parametrize(
    ("override", "said"),
    [("--orchestrator.max_async_level=1", "synchronous runs only"), ("--run.max_steps=3", "needs at least 4 steps")],
)
def test_a_run_that_cannot_be_compared_is_said_at_once(override: str, said: str) -> None:
    finding = doctor.check_resume(config("--trainer.optimizer.schedule.warmup_steps=1", override))
    assert not finding.is_good
    assert said in finding.text


@pytest.mark.slow
def test_an_exact_resume_is_good_and_one_that_forgets_where_the_tasks_were_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config("--run.max_steps=4")
    good = doctor.check_resume(settings)
    assert good.is_good, good.text
    monkeypatch.setattr(UniformSampler, "load_state_dict", lambda self, state: None)
    bad = doctor.check_resume(settings)
    assert not bad.is_good
    assert "the rollouts of step 3" in bad.text and "params." in bad.text


def test_the_doctor_leaves_no_run_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = small_arguments(tmp_path / "run")
    assert doctor.main([*arguments, "--check=config", "--check=budgets"]) == 0
    assert not (tmp_path / "run").exists()
