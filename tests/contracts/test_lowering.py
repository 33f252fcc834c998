"""What trains and what generates is lowered for accelerators here, where there is none: nothing in it belongs to the CPU alone."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxrl.config.trainer import MeshConfig
from jaxrl.engine.cache import decode_and_sample, init_cache, prefill_into_slots, score_rows
from jaxrl.engine.sampling import SamplingArrays
from jaxrl.models import build_model
from jaxrl.models.decode import to_decode_params
from tests.trainer.tiny import ALONE, MESHES, UNTIED, make_config, make_programs

PLATFORMS = ("tpu", "cuda")


def assert_is_portable(module: str) -> None:
    """No call out of XLA (a LAPACK routine, a callback into Python) and no double precision."""
    assert "stablehlo.dot_general" in module or "stablehlo.sqrt" in module
    assert re.findall(r"custom_call @[\w.]+", module) == []
    assert re.findall(r"tensor<(?:\d+x)*f64>", module) == []


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("mesh", [ALONE, MESHES["2x2x2"]], ids=str)
def test_the_training_step_is_lowered_for_accelerators_alone_and_partitioned(mesh: MeshConfig, platform: str) -> None:
    # What an accelerator runs: bfloat16 on float32 masters, activations computed twice.
    programs = make_programs(make_config(mesh=mesh, compute_dtype="bfloat16", remat="layer"), 100, UNTIED)
    for name, given_away in (("grad_step", programs.abstract_accumulator), ("apply", programs.abstract_state)):
        module = programs.lower(name, platform).as_text()
        assert_is_portable(module)
        assert f"mhlo.num_partitions = {mesh.num_devices} : i32" in module
        donated = re.findall(r"tf.aliasing_output|jax.buffer_donor", module)
        assert len(donated) == len(jax.tree.leaves(given_away)), "a buffer that is not donated is held twice"


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_programs_of_the_engine_are_lowered_for_accelerators(platform: str) -> None:
    slots, window, rows, length = 4, 32, 2, 8
    model = build_model(UNTIED)
    layout = functools.partial(to_decode_params, spec=UNTIED, dtype="bfloat16")
    params = jax.eval_shape(layout, model.abstract_params("float32"))
    cache = jax.eval_shape(functools.partial(init_cache, UNTIED, slots, window, jnp.bfloat16))

    def of(*shape: int, dtype: type = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    floats = of(slots, dtype=jnp.float32)
    sampling = SamplingArrays(floats, of(slots), floats, floats, of(slots, 2, dtype=jnp.uint32))
    traced = [
        jax.jit(layout).trace(model.abstract_params("float32")),
        prefill_into_slots.trace(params, cache, of(rows, length), of(slots), of(slots), spec=UNTIED),
        decode_and_sample.trace(params, cache, of(slots), of(slots), sampling, spec=UNTIED, num_steps=1),
        decode_and_sample.trace(params, cache, of(slots), of(slots), sampling, spec=UNTIED, num_steps=4),
        score_rows.trace(params, of(rows, length), of(rows, dtype=jnp.float32), spec=UNTIED),
    ]
    publication, *generation = (trace.lower(lowering_platforms=(platform,)).as_text() for trace in traced)
    for module in generation:
        assert_is_portable(module)
    assert "custom_call" not in publication
