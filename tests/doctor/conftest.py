"""The doctor takes every device of the process; the small run is made for one."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from jaxrl import models
from jaxrl.config.trainer import MeshConfig
from jaxrl.launch import training
from tests.doctor.patients import ModelDir


@pytest.fixture(autouse=True)
def _one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_mesh(config: MeshConfig, devices: object = None) -> jax.sharding.Mesh:
        return models.mesh.build_mesh(config, jax.devices()[:1])

    monkeypatch.setattr(models, "build_mesh", build_mesh)
    monkeypatch.setattr(training, "build_mesh", build_mesh)


@pytest.fixture
def model_dir(tmp_path: Path) -> ModelDir:
    """A model directory of its own for the test."""
    return ModelDir(tmp_path)
