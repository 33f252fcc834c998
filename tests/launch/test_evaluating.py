"""From a request to a result: what a folder is for, and what is read of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.checkpoints import RunCheckpoint
from jaxrl.config.eval_command import EvalCommandConfig, env_tables
from jaxrl.config.evals import EvalParameters
from jaxrl.config.load import load_config
from jaxrl.config.trainer import MeshConfig
from jaxrl.errors import CheckpointError, ConfigError
from jaxrl.launch.checkpoint_model import step_of, weights_id, weights_of
from jaxrl.launch.evaluating import CheckpointModel, EvalRequest, evaluate
from jaxrl.models import build_mesh, load_pretrained, load_spec
from jaxrl.trainer.checkpoint import Checkpointer
from tests.e2e.runs import ROOT, small_run

MODEL = str(ROOT / "configs/quickstart/start_model")


class Silent:
    """Shows nothing, and keeps the phases."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def progress(self, num_done: int, num_planned: int) -> None:
        pass


def test_a_folder_of_another_evaluation_is_found_out_before_a_model_is_loaded(tmp_path: Path) -> None:
    def request(limit: int) -> EvalRequest:
        command = load_config({"env": env_tables("py:tests.eval_worlds:sums")}, [], EvalCommandConfig)
        parameters = EvalParameters(limit=limit, model="m")
        return EvalRequest("sums", command, parameters, CheckpointModel(MODEL), tmp_path / "out")

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "plan.json").write_text('{"config": {"dataset": "others"}}')
    display = Silent()
    with pytest.raises(ConfigError, match="holds another evaluation"):
        evaluate(request(3), display)
    assert display.phases == ["preparing sums", "starting JAX"]


def test_only_the_parameters_of_a_runs_checkpoint_are_read(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    spec = load_spec(MODEL)
    params = jax.tree.map(lambda leaf: leaf + 0.25, load_pretrained(MODEL)[1])
    checkpointer = Checkpointer(tmp_path / "checkpoints", 2, build_mesh(MeshConfig(), jax.devices()[:1]))
    for step in (2, 4):
        state = {"params": params, "opt_state": {"mu": jnp.zeros(7)}, "step": jnp.int32(step)}
        checkpointer.save(step, state, {"orchestrator": f"after {step}".encode()})
    newest = RunCheckpoint(tmp_path, None)
    assert (step_of(newest), step_of(RunCheckpoint(tmp_path, 2))) == (4, 2)
    found = weights_of(MODEL, spec, newest, run, 4, "float32")
    jax.tree.map(np.testing.assert_array_equal, found, params)
    with pytest.raises(ConfigError, match="no complete checkpoint of step 3; complete are 2, 4"):
        step_of(RunCheckpoint(tmp_path, 3))
    names = {weights_id(MODEL, newest, step) for step in (2, 4)} | {weights_id(MODEL, None, 0)}
    assert len(names) == 3, "other weights have another name"
    half = run.model_copy(update={"trainer": run.trainer.model_copy(update={"param_dtype": "bfloat16"})})
    with pytest.raises(CheckpointError, match="of another model"):
        weights_of(MODEL, spec, newest, half, 4, "float32")
