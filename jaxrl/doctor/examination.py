"""One configuration under examination, and what several checks look at: its tokenizer, its worlds, its model on a device.

Everything is built once, when a check first asks for it, and given back at the end. A part that cannot be built fails each
check that needs it, with the same error and at no further cost. It judges nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Self

from jaxrl.config.run import RunConfig
from jaxrl.errors import JaxrlError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from jaxrl.envs.base import Environment
    from jaxrl.inference.rendering import Renderer
    from jaxrl.launch import ArrayArm
    from jaxrl.trainer.step import StepPrograms


class Examination:
    """A `RunConfig` and what its checks share; a context manager that gives back what was built."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._stack = contextlib.ExitStack()
        self._arm: ArrayArm | JaxrlError | None = None
        self._worlds: list[list[Environment]] | JaxrlError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release_arm()
        if isinstance(self._worlds, list):
            for env in itertools.chain(*self._worlds):
                env.close()

    @property
    def model_name(self) -> str:
        """The policy's directory or hub name."""
        return self.config.orchestrator.model.name

    @functools.cached_property
    def directory(self) -> Path:
        """Where the tokenizer's files and config.json are."""
        from jaxrl.inference.hub import resolve_model_directory

        return resolve_model_directory(self.model_name, "tokenizer")

    @functools.cached_property
    def renderer(self) -> Renderer:
        """Messages to token ids, as the run does it."""
        from jaxrl.inference.rendering.known_models import load_renderer

        model = self.config.orchestrator.model
        return load_renderer(model.name, renderer=model.renderer, tool_format=model.tool_format)

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer by itself, for what its files say beside what is made of them."""
        return self.renderer.tokenizer

    @property
    def worlds(self) -> tuple[list[Environment], list[Environment]]:
        """The training and the evaluation environments."""
        if self._worlds is None:
            from jaxrl.launch import build_worlds

            try:
                _, *self._worlds = build_worlds(self.config)
            except JaxrlError as error:
                self._worlds = error
        if isinstance(self._worlds, JaxrlError):
            raise self._worlds
        train, heldout = self._worlds
        return train, heldout

    @property
    def programs(self) -> StepPrograms:
        """The trainer's programs on the run's mesh: the arm's if there is one, else ones for which no weight is loaded."""
        return self._planned_programs if self._arm is None else self.arm.programs

    @functools.cached_property
    def _planned_programs(self) -> StepPrograms:
        from jaxrl.models import build_mesh, load_spec
        from jaxrl.models.transformer import build_model
        from jaxrl.trainer.step import build_programs

        self._use_compile_cache()
        mesh = build_mesh(self.config.trainer.mesh)
        return build_programs(build_model(load_spec(self.model_name), mesh), self.config.trainer, mesh, self.config.run.max_steps)

    @property
    def arm(self) -> ArrayArm:
        """The model on its devices, with trainer and engine, compiled."""
        if self._arm is None:
            try:
                self._arm = self._build_arm()
            except JaxrlError as error:
                self._arm = error
        if isinstance(self._arm, JaxrlError):
            raise self._arm
        return self._arm

    def release_arm(self) -> None:
        """Give the devices' memory back; `arm` builds it anew."""
        self._arm = None
        self._stack.close()

    def _use_compile_cache(self) -> None:
        """Take from disk what a run or an earlier look has compiled, and keep what is compiled now for the run."""
        from jaxrl.launch.compile_cache import use_compile_cache

        use_compile_cache(is_on=self.config.run.compile_cache, directory=self.config.run.compile_cache_dir)

    def _build_arm(self) -> ArrayArm:
        from jaxrl.launch import array_arm
        from jaxrl.models import build_mesh

        self._use_compile_cache()
        mesh = build_mesh(self.config.trainer.mesh)
        return self._stack.enter_context(array_arm(self.config, self.renderer, mesh, _show_nothing))


def _show_nothing(phase: str, done: float, total: float, detail: str = "") -> None:
    """Take the place of a progress bar."""
