"""Public functions of the maths refuse an argument of another rank, shape or kind of dtype, instead of broadcasting it."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.config.trainer import DefaultLossConfig
from jaxrl.losses import compute_loss, count_members, has_context, token_scores
from jaxrl.losses.ce import ce_terms
from jaxrl.losses.importance import policy_terms, probability_gap
from jaxrl.losses.ref_kl import ref_kl_terms
from jaxrl.losses.rl import RLInputs, rl_terms
from tests.losses.cases import random_arrays

FLOATS, INTS, BOOLS = (jnp.zeros((2, 3), dtype) for dtype in (jnp.float32, jnp.int32, bool))


def loss_of(**changed):
    return compute_loss({**random_arrays(0, rows=2, length=3), **changed}, np.ones(3, np.float32), DefaultLossConfig())


def members_of(segment_ids):
    return count_members({**random_arrays(0, rows=2, length=3), "segment_ids": segment_ids})


CALLS = {
    "ce_terms": (ce_terms, [FLOATS, FLOATS]),
    "ref_kl_terms": (ref_kl_terms, [FLOATS, FLOATS, FLOATS, FLOATS, FLOATS, BOOLS]),
    "probability_gap": (probability_gap, [FLOATS, FLOATS]),
    "policy_terms": (partial(policy_terms, kl_tau=1e-3), [FLOATS, FLOATS, FLOATS, BOOLS]),
    "rl_terms": (lambda *arrays: rl_terms(RLInputs(*arrays), DefaultLossConfig()), [FLOATS, FLOATS, FLOATS, FLOATS, BOOLS, INTS]),
    "has_context": (has_context, [INTS]),
    "token_scores": (partial(token_scores, chunk_tokens=4), [jnp.zeros((2, 3, 4)), jnp.zeros((5, 4)), INTS, INTS, FLOATS + 1]),
    "compute_loss": (lambda advantages, segment_ids: loss_of(advantages=advantages, segment_ids=segment_ids), [FLOATS, INTS]),
    "count_members": (members_of, [INTS]),
}


def with_one(arrays, index, changed):
    return [*arrays[:index], changed, *arrays[index + 1 :]]


@pytest.mark.parametrize(("name", "index"), [(name, i) for name, (_, arrays) in CALLS.items() for i in range(len(arrays))])
def test_another_rank_shape_or_dtype_is_refused(name, index):
    call, arrays = CALLS[name]
    call(*arrays)
    good = arrays[index]
    other_kind = jnp.float32 if good.dtype != jnp.float32 else jnp.int32
    for bad in (good[0], good.astype(other_kind)):
        with pytest.raises(AssertionError):
            call(*with_one(arrays, index, bad))
    if len(arrays) > 1:
        with pytest.raises(AssertionError):
            call(*with_one(arrays, index, jnp.concatenate([good, good], axis=-1)))
