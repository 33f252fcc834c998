"""Weights in memory: each policy version is published once, as a copy in the engine's layout and dtype.

In go the trainer's parameters, out come `DecodeParams`. Publication is one compiled program whose outputs never alias
its inputs, so the trainer may donate its state at once while the engine still decodes on an older version. The store
does not tell anyone about a version; that is the channel's work.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import jax

from jaxrl.errors import EngineError
from jaxrl.models.decode import DecodeParams, to_decode_params
from jaxrl.models.spec import ModelSpec

_copy_for_engine = jax.jit(to_decode_params, static_argnums=(1, 2))


class WeightStore:
    """The newest published versions of one policy; `publish` belongs to the device thread, the rest to any thread."""

    def __init__(
        self,
        model_spec: ModelSpec,
        dtype: str,
        *,
        num_versions: int = 2,
        device: jax.Device | None = None,  # pyright: ignore[reportInvalidTypeForm]
    ) -> None:
        """Start empty.

        Args:
          model_spec: the architecture.
          dtype: the engine's dtype.
          num_versions: versions kept: the one being served, and those that the trainer may publish before it is
            replaced.
          device: where the copies live; the first local device if None.
        """
        self._num_versions = num_versions
        self._device = device or jax.local_devices()[0]
        self._model_spec = model_spec
        self._dtype = dtype
        self._versions: dict[int, DecodeParams] = {}
        self._lock = threading.Lock()

    @property
    def newest(self) -> int | None:
        """The version published last; None before the first."""
        with self._lock:
            return next(reversed(self._versions), None)

    def publish(self, version: int, params: Mapping[str, Any]) -> None:
        """Copy the trainer's parameters as policy `version` and forget all but the `num_versions` published last.

        Args:
          version: must be above every version published before.
          params: the model's parameter tree; free to be donated as soon as this returns.

        Raises:
          EngineError: a version that is not newer: two writers, or a step that was published twice.
        """
        newest = self.newest
        if newest is not None and version <= newest:
            raise EngineError(f"version {version} was published after version {newest}; versions only grow")
        # Parameters sharded over a mesh are gathered here; on one device the second step moves nothing.
        decode_params = jax.device_put(_copy_for_engine(params, self._model_spec, self._dtype), self._device)
        with self._lock:
            self._versions[version] = decode_params
            for old in list(self._versions)[: -self._num_versions]:
                del self._versions[old]

    def get(self, version: int) -> DecodeParams:
        """Return a published version.

        Raises:
          EngineError: the version was never published or has been replaced.
        """
        with self._lock:
            if version not in self._versions:
                raise EngineError(f"policy version {version} is not in memory; the store holds {list(self._versions)}")
            return self._versions[version]
