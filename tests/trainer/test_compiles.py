"""The compile counter counts programs, not calls."""

import jax
import jax.numpy as jnp

from jaxrl.trainer.compiles import num_compiles


def test_three_shapes_are_three_compilations_and_a_repeated_shape_is_none():
    program = jax.jit(lambda x: x * 1.5 + 0.25)
    inputs = [jnp.ones(n) for n in (11, 12, 13)]
    before = num_compiles()
    for x in inputs:
        program(x)
    assert num_compiles() - before == 3
    for x in inputs:
        program(x)
    assert num_compiles() - before == 3
