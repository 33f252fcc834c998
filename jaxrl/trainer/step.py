"""The update as a handful of compiled programs over a mesh: count, accumulate, apply.

In: a `Model`, the configuration and a mesh; then dense micro-batch arrays. Out: `StepPrograms`. Every program is one
`jax.jit` with explicit shardings, compiled once: the number of micro-batches and the streams that a batch carries never
change a program. Communication of a step: one all-reduce of the member counts, the gradient's per micro-batch, the
norm's in `apply`. It never decides when to run: `trainer.loop` does.

A step without an update leaves parameters, moments and learning rate exactly as they were, and still counts as a step.
There are two kinds: *skipped*, when the gradient's norm is not finite, and *empty*, when no token is a member of any
component (the gradient is exactly zero then, and weight decay and momentum alone would move the policy without any
data).

Shape letters: B rows of all shards, T positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.config.trainer import COUNT_AXES, TrainerConfig
from jaxrl.losses import MetricSums, finish_metrics, has_context, loss_and_sums, merge_metrics, token_scores
from jaxrl.models import Model
from jaxrl.models.mesh import batch_sharding, replicated, with_shardings
from jaxrl.models.transformer import Params
from jaxrl.trainer.optimizer import build_optimizer, build_schedule
from jaxrl.trainer.state import Accumulator, TrainState
from jaxrl.types import COMPONENTS, STREAM_FILL, MicroBatch

Arrays = Mapping[str, np.ndarray | jax.Array]
"""Dense [B, T] arrays of a micro-batch by name; see `ARRAY_DTYPES`."""

ARRAY_DTYPES: Mapping[str, type] = {
    "token_ids": np.int32,
    "segment_ids": np.int32,
    "position_ids": np.int32,
    "loss_mask": np.bool_,
    "inference_logprobs": np.float32,
    "temperatures": np.float32,
    **dict.fromkeys(STREAM_FILL, np.float32),
}
"""Name and dtype of every array that `grad_step` takes; always all of them."""


def densify(micro_batch: MicroBatch) -> dict[str, np.ndarray]:
    """Fill the streams that a micro-batch does not carry, so that all micro-batches look alike to a compiled program.

    An absent stream holds its identity on real tokens (`rl_weights` 1.0, others 0.0) and 0.0 on padding.

    Args:
      micro_batch: as packed; its arrays are not copied.

    Returns:
      [B, T] arrays by name, as in `ARRAY_DTYPES`; `sample_index` stays behind.
    """
    is_real = micro_batch.segment_ids != 0
    arrays = {}
    for name, dtype in ARRAY_DTYPES.items():
        array = getattr(micro_batch, name)
        if array is None:
            array = np.where(is_real, np.float32(STREAM_FILL[name]), np.float32(0.0))
        arrays[name] = np.asarray(array, dtype=dtype)
    return arrays


def build_psum_denominators(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Build the one program that adds up member counts.

    Args:
      mesh: counts are summed over those of its axes that split tokens (`COUNT_AXES`), never over tensor, whose devices
        see the same tokens.

    Returns:
      A jitted function from [shards, 3] int32, one row per shard, to [3] float32, each at least 1; replicated. It is
      exactly one all-reduce.
    """
    axes = tuple(axis for axis in COUNT_AXES if axis in mesh.axis_names)
    num_shards = math.prod(mesh.shape[axis] for axis in axes)

    @jax.shard_map(mesh=mesh, in_specs=PartitionSpec(axes), out_specs=PartitionSpec())
    def add_up(counts: jax.Array) -> jax.Array:
        total = jax.lax.psum(jnp.sum(counts, axis=0), axes)
        return jnp.maximum(total, 1).astype(jnp.float32)

    def psum_denominators(counts: jax.Array) -> jax.Array:
        chex.assert_shape(counts, (num_shards, len(COMPONENTS)))
        chex.assert_type(counts, jnp.int32)
        return add_up(counts)

    return jax.jit(psum_denominators, in_shardings=NamedSharding(mesh, PartitionSpec(axes)))


class StepPrograms:
    """The compiled programs of one trainer; build with `build_programs`.

    Every method that takes a state or an accumulator and returns a new one takes ownership of the old: its buffers are
    donated or freed, and using them again raises. All methods are JAX calls and belong on the device thread.
    """

    def __init__(self, model: Model, config: TrainerConfig, mesh: Mesh, max_steps: int) -> None:
        assert model.mesh is None or model.mesh == mesh, (
            "the model pins its activations on another mesh than the trainer's"
        )
        self.model = model
        self.config = config
        self.mesh = mesh
        self._optimizer = build_optimizer(config.optimizer)
        self._schedule = build_schedule(config.optimizer, max_steps)

        params = with_shardings(mesh, model.abstract_params(config.param_dtype))
        self.abstract_state: TrainState = with_shardings(mesh, jax.eval_shape(self._new_state, params))
        """Shape, dtype and sharding of every leaf of the state: what a checkpoint is restored into."""
        rows = config.rows * config.mesh.row_shards
        batch = batch_sharding(mesh)
        arrays = {
            name: jax.ShapeDtypeStruct((rows, config.row_length), dtype, sharding=batch)
            for name, dtype in ARRAY_DTYPES.items()
        }
        counts = jax.ShapeDtypeStruct((config.mesh.row_shards, len(COMPONENTS)), jnp.int32)
        denominators = jax.ShapeDtypeStruct((len(COMPONENTS),), jnp.float32, sharding=replicated(mesh))
        metrics = jax.eval_shape(self._loss, params, arrays, denominators)[1][0]
        grads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
        self.abstract_accumulator = accumulator = Accumulator(with_shardings(mesh, grads), with_shardings(mesh, metrics))
        """Shape, dtype and sharding of every sum of a step."""

        state_shardings, sums_shardings = _shardings(self.abstract_state), _shardings(accumulator)
        self._start = jax.jit(self._new_state, out_shardings=state_shardings, donate_argnums=0)
        jitted = {
            "zero_accumulator": jax.jit(self._zeros, out_shardings=sums_shardings),
            "psum_denominators": build_psum_denominators(mesh),
            "grad_step": jax.jit(self._accumulate, out_shardings=(sums_shardings, batch), donate_argnums=1),
            # The accumulator is not donated: no output could take its memory. `apply` frees it instead.
            "apply": jax.jit(self._update, out_shardings=(state_shardings, replicated(mesh)), donate_argnums=0),
        }
        inputs = {
            "zero_accumulator": (),
            "psum_denominators": (counts,),
            "grad_step": (params, accumulator, arrays, denominators),
            "apply": (self.abstract_state, accumulator),
        }
        self._traces = {name: functools.partial(jitted[name].trace, *inputs[name]) for name in jitted}
        self._compiled: dict[str, jax.stages.Compiled] = {}

    @property
    def num_programs(self) -> int:
        """How many programs `compile` goes through."""
        return len(self._traces)

    def program(self, name: str) -> jax.stages.Compiled:
        """Return a compiled program by the name of its method; `as_text()` and `memory_analysis()` tell of it.

        Compiled ahead of time, for the configured shapes only: another shape is an error, never a recompilation.
        """
        if name not in self._compiled:
            self._compiled[name] = self.lower(name).compile()
        return self._compiled[name]

    def lower(self, name: str, platform: str | None = None) -> jax.stages.Lowered:
        """Lower a program without compiling it.

        Args:
          name: as in `program`.
          platform: `"cpu"`, `"tpu"` or `"cuda"`, whether or not there is such a device; None for that of the mesh.
        """
        return self._traces[name]().lower(lowering_platforms=None if platform is None else (platform,))

    def compile(self, on_progress: Callable[[str, int, int], None] | None = None) -> None:
        """Compile every program that is not compiled yet; a step compiles nothing afterwards.

        Args:
          on_progress: called before each program with (its name, how many are done, how many there are); may raise to stop.
        """
        for done, name in enumerate(self._traces):
            if on_progress is not None:
                on_progress(name, done, len(self._traces))
            self.program(name)

    def init_state(self, params: Params) -> TrainState:
        """Start a run from parameters, with fresh moments.

        Args:
          params: the parameter dict of the model, on any devices; the state takes ownership of it.

        Returns:
          The state at step 0, laid out over the mesh.
        """
        chex.assert_trees_all_equal_structs(params, self.abstract_state.params)
        chex.assert_trees_all_equal_shapes(params, self.abstract_state.params)
        params = jax.tree.map(lambda leaf: leaf.astype(self.config.param_dtype), params)
        return self._start(jax.device_put(params, _shardings(self.abstract_state.params)))

    def zero_accumulator(self) -> Accumulator:
        """Return the sums of no micro-batch at all."""
        return self.program("zero_accumulator")()

    def psum_denominators(self, counts: np.ndarray) -> jax.Array:
        """Add up the member counts of all shards.

        Args:
          counts: [shards, 3] int32, member tokens of rl, ce and ref_kl in each shard, over the micro-batches of a step.

        Returns:
          [3] float32, each at least 1, on every device.
        """
        chex.assert_shape(counts, (self.config.mesh.row_shards, len(COMPONENTS)))
        return self.program("psum_denominators")(counts)

    def grad_step(
        self, state: TrainState, accumulator: Accumulator, arrays: Arrays, denominators: jax.Array
    ) -> tuple[Accumulator, jax.Array]:
        """Add one micro-batch's share of the gradient and of the metrics.

        Args:
          state: read only.
          accumulator: sums of the earlier micro-batches; consumed.
          arrays: from `densify`, [B, T] each.
          denominators: [3] float32 from `psum_denominators`.

        Returns:
          The new sums, and [B, T] float32 logprobs under `state` at the sampling temperatures (0.0 on tokens without
          context).
        """
        rows = self.config.rows * self.config.mesh.row_shards
        chex.assert_shape(list(arrays.values()), (rows, self.config.row_length))
        return self.program("grad_step")(state.params, accumulator, dict(arrays), denominators)

    def apply(self, state: TrainState, accumulator: Accumulator) -> tuple[TrainState, dict[str, jax.Array]]:
        """Make the update of a step, or leave everything but the counters as it was (see the module).

        Args:
          state: consumed.
          accumulator: sums of all micro-batches of the step; consumed.

        Returns:
          The state after the step, and float32 scalars by metric name: those of the losses, `optim/grad_norm` (before
          clipping), `optim/lr` (the rate that this step used), and `optim/skipped_steps` and `optim/empty_steps` of the
          whole run so far.
        """
        state, metrics = self.program("apply")(state, accumulator)
        for leaf in jax.tree.leaves(accumulator):
            leaf.delete()
        return state, metrics

    def _zeros(self) -> Accumulator:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.abstract_accumulator)

    def _new_state(self, params: Params) -> TrainState:
        # Three separate zeros: one shared buffer could not be donated three times.
        step, num_skipped, num_empty = (jnp.zeros((), jnp.int32) for _ in range(3))
        return TrainState(params, self._optimizer.init(params), step, num_skipped, num_empty)

    def _loss(
        self, params: Params, arrays: Mapping[str, jax.Array], denominators: jax.Array
    ) -> tuple[jax.Array, tuple[MetricSums, jax.Array]]:
        """This micro-batch's share of the objective, with its metric sums and logprobs."""
        token_ids, segment_ids = arrays["token_ids"], arrays["segment_ids"]
        hidden = self.model.hidden(
            params,
            token_ids,
            arrays["position_ids"],
            segment_ids,
            compute_dtype=jnp.dtype(self.config.compute_dtype),
            remat=self.config.remat,
        )
        # A temperature counts only where a token was sampled or is compared with its sampler; anything else there must
        # not reach a gradient.
        is_tempered = has_context(segment_ids) & (arrays["loss_mask"] | (arrays["ref_kl_weights"] != 0))
        scores = token_scores(
            hidden,
            self.model.head(params),
            token_ids,
            segment_ids,
            jnp.where(is_tempered, arrays["temperatures"], 1.0),
            chunk_tokens=self.config.head_chunk_tokens,
            mesh=self.mesh,
        )
        scored = {
            "trainer_logprobs": scores.logprobs,
            "trainer_logprobs_raw": scores.logprobs_raw,
            "entropy": scores.entropy,
        }
        total, sums = loss_and_sums({**arrays, **scored}, denominators, self.config.loss)
        return total, (sums, scores.logprobs)

    def _accumulate(
        self, params: Params, accumulator: Accumulator, arrays: Mapping[str, jax.Array], denominators: jax.Array
    ) -> tuple[Accumulator, jax.Array]:
        grads, (metrics, logprobs_BT) = jax.grad(self._loss, has_aux=True)(params, arrays, denominators)
        grads = jax.tree.map(lambda total, share: total + share.astype(jnp.float32), accumulator.grads, grads)
        return Accumulator(grads, merge_metrics(accumulator.metrics, metrics)), logprobs_BT

    def _update(self, state: TrainState, accumulator: Accumulator) -> tuple[TrainState, dict[str, jax.Array]]:
        metrics = finish_metrics(accumulator.metrics)
        grad_norm = optax.tree.norm(accumulator.grads)
        num_members = sum(metrics[f"tokens/{component}"] for component in COMPONENTS)
        is_finite, is_empty = jnp.isfinite(grad_norm), num_members == 0
        is_update = is_finite & ~is_empty

        lr = self._schedule(state.num_updates)

        def update() -> tuple[Params, optax.OptState]:
            direction, opt_state = self._optimizer.update(
                accumulator.grads, state.opt_state, state.params, grad_norm=grad_norm
            )
            params = jax.tree.map(lambda param, towards: param - lr * towards, state.params, direction)
            return jax.tree.map(lambda new, old: new.astype(old.dtype), (params, opt_state), (state.params, state.opt_state))

        # A branch, not a choice for every entry: that needs old and new moments side by side, a gibibyte for 135 M
        # parameters, and takes three times as long on a CPU.
        params, opt_state = jax.lax.cond(is_update, update, lambda: (state.params, state.opt_state))
        state = TrainState(
            params=params,
            opt_state=opt_state,
            step=state.step + 1,
            num_skipped=state.num_skipped + (~is_finite).astype(jnp.int32),
            num_empty=state.num_empty + (is_finite & is_empty).astype(jnp.int32),
        )
        metrics |= {
            "optim/grad_norm": grad_norm,
            "optim/lr": jnp.asarray(lr, jnp.float32),
            "optim/skipped_steps": state.num_skipped.astype(jnp.float32),
            "optim/empty_steps": state.num_empty.astype(jnp.float32),
        }
        return state, metrics


def build_programs(model: Model, config: TrainerConfig, mesh: Mesh, max_steps: int) -> StepPrograms:
    """Build the programs of a trainer; nothing is compiled before it is called.

    Args:
      model: the network; pinned to `mesh` or to none.
      config: shapes, precision, loss and optimizer.
      mesh: from `models.build_mesh`.
      max_steps: optimizer steps of the whole run, which the learning-rate schedule needs.

    Returns:
      The programs, and `abstract_state` to restore a checkpoint into.

    Raises:
      ConfigError: the mesh does not divide a parameter or the rows.
    """
    return StepPrograms(model, config, mesh, max_steps)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
