import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec
from jax.test_util import check_grads

from jaxrl.config.trainer import FSDP_AXIS, TENSOR_AXIS, MeshConfig
from jaxrl.losses import TokenScores, has_context, token_scores
from jaxrl.models.mesh import batch_sharding, build_mesh
from tests.losses.cases import GOLDEN, without_context

ROWS, LENGTH, HIDDEN, VOCAB = 8, 13, 5, 11
GARBAGE = (np.nan, np.inf, -np.inf, 1e30)

Inputs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _inputs(seed: int = 0, dtype: type = np.float32, vocab: int = VOCAB) -> Inputs:
    """Hidden states, head, ids, segments and temperatures, with several segments and padding in most rows."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(ROWS, LENGTH, HIDDEN)).astype(dtype)
    head = rng.normal(size=(vocab, HIDDEN)).astype(dtype)
    token_ids = rng.integers(0, vocab, (ROWS, LENGTH)).astype(np.int32)
    num_real = rng.integers(0, LENGTH + 1, (ROWS, 1))
    segment_ids = np.where(np.arange(LENGTH)[None] < num_real, 1 + np.arange(LENGTH)[None] // 4, 0).astype(np.int32)
    temperatures = rng.uniform(0.5, 2.0, (ROWS, LENGTH)).astype(dtype)
    return hidden, head, token_ids, segment_ids, temperatures


def _plain(hidden, head, token_ids, segment_ids, temperatures) -> TokenScores:
    """Everything at once: full logits, shifted, masked."""
    logits = hidden[:, :-1] @ head.T
    tempered = jax.nn.log_softmax(logits / temperatures[:, 1:, None])
    raw = jax.nn.log_softmax(logits)
    entropy = jax.lax.stop_gradient(-jnp.sum(jnp.exp(tempered) * tempered, axis=2))
    pick = [jnp.take_along_axis(logprobs, token_ids[:, 1:, None], axis=2)[:, :, 0] for logprobs in (tempered, raw)]
    is_scored = has_context(segment_ids)[:, 1:]
    return TokenScores(*(jnp.pad(jnp.where(is_scored, scores, 0), ((0, 0), (1, 0))) for scores in (*pick, entropy)))


def _scores_and_grads(score, inputs: Inputs, **kwargs):
    """Scores, and gradients of a mix of both logprobs with respect to the hidden states and the head."""
    shape = np.shape(inputs[2])
    mix, mix_raw = (np.random.default_rng(seed).normal(size=shape).astype(np.float32) for seed in (7, 8))

    def loss(hidden, head, *streams):
        scores = score(hidden, head, *streams, **kwargs)
        return jnp.sum(mix * scores.logprobs + mix_raw * scores.logprobs_raw), scores

    (_, scores), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(*map(jnp.asarray, inputs))
    return scores, grads


_compiled = jax.jit(_scores_and_grads, static_argnums=0, static_argnames=("chunk_tokens", "mesh"))
"""Shared by the tests, which use the same shapes: compiling is what takes time here."""


def _assert_close(ours, theirs, **tolerance):
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, other, **tolerance)


@pytest.mark.parametrize("is_compiled", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_golden_logprobs_and_entropies_are_shifted_and_tempered(dtype, is_compiled):
    (case,) = GOLDEN["logprob_cases"]
    tolerance = {"rtol": 1e-12, "atol": 1e-14} if dtype == np.float64 else {"rtol": 2e-5, "atol": 1e-6}
    with jax.enable_x64(dtype == np.float64):
        hidden = np.asarray([case["logits"]], dtype)
        inputs = (hidden, np.eye(4, dtype=dtype), np.asarray([case["token_ids"]]), np.ones((1, 5), np.int32))
        inputs = (*inputs, np.asarray([case["temperatures"]], dtype))
        run = _compiled if is_compiled else _scores_and_grads
        scores, grads = run(token_scores, inputs, chunk_tokens=2)
        np.testing.assert_allclose(scores.logprobs[0], case["expected_logprobs"], **tolerance)
        np.testing.assert_allclose(scores.entropy[0], case["expected_entropy"], **tolerance)
        assert {array.dtype for array in (*scores, *grads)} == {np.dtype(dtype)}
        _, plain_grads = _compiled(_plain, inputs)
        _assert_close(grads, plain_grads, **tolerance)


@pytest.mark.parametrize("chunk_tokens", [1, 24, 40, 10_000])
def test_chunks_of_any_size_equal_the_full_softmax_in_value_and_gradient(chunk_tokens):
    with jax.enable_x64(True):
        inputs = _inputs(dtype=np.float64)
        theirs = _compiled(_plain, inputs)
        ours = _compiled(token_scores, inputs, chunk_tokens=chunk_tokens)
        _assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert np.abs(theirs[1][1]).min() > 1e-3


def test_logits_scored_in_blocks_equal_the_full_softmax():
    inputs = _inputs(vocab=8192)
    chunk_tokens = ROWS * (LENGTH - 1)
    assert "platform_index" in str(jax.make_jaxpr(lambda *arrays: token_scores(*arrays, chunk_tokens=chunk_tokens))(*inputs))
    _assert_close(_compiled(token_scores, inputs, chunk_tokens=chunk_tokens), _compiled(_plain, inputs), rtol=2e-5, atol=2e-6)


def test_float32_is_close_to_the_full_softmax():
    inputs = _inputs()
    _assert_close(_compiled(token_scores, inputs, chunk_tokens=32), _compiled(_plain, inputs), rtol=2e-5, atol=2e-6)


def test_gradients_agree_with_finite_differences():
    with jax.enable_x64(True):
        hidden, head, *streams = map(jnp.asarray, _inputs(dtype=np.float64))

        @jax.jit
        def logprobs(hidden, head):
            scores = token_scores(hidden, head, *streams, chunk_tokens=24)
            return scores.logprobs + 0.5 * scores.logprobs_raw

        check_grads(logprobs, (hidden, head), order=1, modes=["rev"], rtol=1e-6, atol=1e-6)


def test_tokens_without_context_score_exactly_zero_and_only_rows_that_predict_a_token_get_a_gradient():
    inputs = _inputs()
    is_out = without_context(inputs[3])
    scores, (hidden_grad, _) = _compiled(token_scores, inputs, chunk_tokens=32)
    for array in scores:
        assert not np.asarray(array)[is_out].any()
        assert np.asarray(array)[~is_out].all()
    predicts = np.pad(~is_out[:, 1:], ((0, 0), (0, 1)))
    has_gradient = np.asarray(hidden_grad).any(axis=2)
    np.testing.assert_array_equal(has_gradient, predicts)
    np.testing.assert_array_equal(has_context(jnp.asarray(inputs[3])), ~is_out)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_where_nothing_is_predicted_changes_no_bit(garbage):
    hidden, head, token_ids, segment_ids, temperatures = _inputs()
    is_out = without_context(segment_ids)
    predicts = np.pad(~is_out[:, 1:], ((0, 0), (0, 1)))
    spoilt = (
        np.where(predicts[:, :, None], hidden, np.float32(garbage)),
        head,
        np.where(is_out, np.int32(-(2**31)), token_ids),
        segment_ids,
        np.where(is_out, np.float32(garbage), temperatures),
    )
    clean = _compiled(token_scores, (hidden, head, token_ids, segment_ids, temperatures), chunk_tokens=32)
    for mine, other in zip(jax.tree.leaves(clean), jax.tree.leaves(_compiled(token_scores, spoilt, chunk_tokens=32)), strict=True):
        assert np.isfinite(mine).all()
        np.testing.assert_array_equal(mine, other)


def test_a_non_finite_gradient_of_a_token_without_context_goes_nowhere():
    inputs = _inputs()
    is_out = without_context(inputs[3])

    def loss(hidden, head):
        scores = token_scores(hidden, head, *inputs[2:], chunk_tokens=32)
        return jnp.sum(jnp.where(is_out, jnp.inf, 1.0) * scores.logprobs)

    assert all(np.isfinite(grad).all() for grad in jax.jit(jax.grad(loss, argnums=(0, 1)))(*inputs[:2]))


def test_raw_and_tempered_logprobs_are_equal_when_every_temperature_is_one():
    *inputs, temperatures = _inputs()
    scores = token_scores(*inputs, np.ones_like(temperatures), chunk_tokens=32)
    np.testing.assert_array_equal(scores.logprobs, scores.logprobs_raw)
    halved = token_scores(*inputs, 0.5 * np.ones_like(temperatures), chunk_tokens=32)
    np.testing.assert_array_equal(halved.logprobs_raw, scores.logprobs_raw)
    assert np.abs(halved.logprobs - scores.logprobs).max() > 0.1


def test_entropy_carries_no_gradient_and_peaks_at_log_vocab():
    hidden, head, *streams = _inputs()

    def entropy(hidden, head):
        return jnp.sum(token_scores(hidden, head, *streams, chunk_tokens=32).entropy)

    assert not any(np.asarray(grad).any() for grad in jax.jit(jax.grad(entropy, argnums=(0, 1)))(hidden, head))
    uniform = token_scores(np.zeros_like(hidden), head, *streams, chunk_tokens=32)
    np.testing.assert_allclose(uniform.entropy[~without_context(streams[1])], np.log(VOCAB), rtol=1e-6)


def test_extreme_logits_stay_finite():
    hidden, head, *streams = _inputs()
    scores, grads = _compiled(token_scores, (1e4 * hidden, head, *streams), chunk_tokens=32)
    assert all(np.isfinite(array).all() for array in (*scores, *grads))
    assert np.all(np.asarray(scores.entropy) >= 0)


def test_bfloat16_inputs_are_scored_in_float32():
    hidden, head, *streams = _inputs()
    rounded = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    scores, grads = _compiled(token_scores, (*rounded, *streams), chunk_tokens=32)
    exact, exact_grads = _compiled(_plain, (*(np.asarray(array, np.float32) for array in rounded), *streams))
    assert {array.dtype for array in scores} == {np.dtype(np.float32)}
    assert {array.dtype for array in grads} == {np.dtype(jnp.bfloat16)}
    _assert_close(scores, exact, rtol=1e-5, atol=1e-5)
    _assert_close([grad.astype(jnp.float32) for grad in grads], exact_grads, rtol=0.02, atol=0.02)
    mixed, _ = _compiled(token_scores, (rounded[0], np.asarray(rounded[1], np.float32), *streams), chunk_tokens=32)
    _assert_close(mixed, exact, rtol=1e-5, atol=1e-5)


def _avals(jaxpr):
    """Every array that a jaxpr and the jaxprs inside it make."""
    for equation in jaxpr.eqns:
        yield from (variable.aval for variable in equation.outvars)
        for inner in jaxprs_in_params(equation.params):
            yield from _avals(inner)


def test_no_array_of_logits_is_larger_than_one_chunk_forward_or_backward():
    vocab, chunk_tokens = 101, 24
    inputs = _inputs(vocab=vocab)

    def program(*inputs):
        return _scores_and_grads(token_scores, inputs, chunk_tokens=chunk_tokens)

    shapes = {aval.shape for aval in _avals(jax.make_jaxpr(program)(*inputs).jaxpr) if hasattr(aval, "shape")}
    text = jax.jit(program).lower(*inputs).compile().as_text()
    shapes |= {tuple(int(size) for size in dims.split(",")) for dims in re.findall(r"\b(?:f32|f64|bf16|pred|s32)\[([\d,]+)\]", text)}
    logits = {shape for shape in shapes if vocab in shape and shape not in ((vocab,), (vocab, HIDDEN), (HIDDEN, vocab))}
    assert logits, "the check looks for arrays with a vocabulary dimension and must find the chunk's"
    assert max(np.prod(shape) for shape in logits) <= chunk_tokens * vocab, sorted(logits)


@pytest.mark.parametrize("axes", [{"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}, {"tensor": 8}], ids=str)
def test_on_a_mesh_each_device_scores_its_own_rows_and_the_results_are_the_same(axes):
    vocab = 16
    hidden, head, *streams = _inputs(vocab=vocab)
    hidden, head = np.pad(hidden, ((0, 0), (0, 0), (0, 3))), np.pad(head, ((0, 0), (0, 3)))
    mesh = build_mesh(MeshConfig(**axes))
    rows, head_sharding = batch_sharding(mesh), NamedSharding(mesh, PartitionSpec(TENSOR_AXIS, FSDP_AXIS))

    def program(*inputs):
        return _scores_and_grads(token_scores, inputs, chunk_tokens=4, mesh=mesh)

    sharded = jax.jit(program, in_shardings=(rows, head_sharding, rows, rows, rows))
    inputs = (hidden, head, *streams)
    _assert_close(sharded(*inputs), _compiled(token_scores, inputs, chunk_tokens=32), rtol=1e-5, atol=1e-5)


def test_on_a_mesh_the_gradient_of_the_head_is_reduced_once_and_not_for_every_chunk():
    mesh = build_mesh(MeshConfig(data=8))
    rows, inputs = batch_sharding(mesh), _inputs()

    def head_gradient(*inputs):
        return _scores_and_grads(token_scores, inputs, chunk_tokens=4, mesh=mesh)[1][1]

    text = jax.jit(head_gradient, in_shardings=(rows, None, rows, rows, rows)).lower(*inputs).compile().as_text()
    assert " while(" in text, "the chunks must be a loop for this to mean anything"
    body_start, entry_start = text.index("ENTRY"), len(text)
    collectives = r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    assert re.findall(collectives, text[body_start:entry_start]) == ["all-reduce"]
    assert re.findall(collectives, text[:body_start]) == []


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_rows_are_scored(length):
    inputs = [array[:, :length] if array.ndim == 2 and array.shape[0] == ROWS else array for array in _inputs()]
    inputs[0] = inputs[0][:, :length]
    inputs[3] = np.ones((ROWS, length), np.int32)
    scores = token_scores(*inputs, chunk_tokens=4)
    assert all(array.shape == (ROWS, length) for array in scores)
    assert np.all(np.asarray(scores.logprobs)[:, 1:] < 0) and not np.asarray(scores.logprobs)[:, 0].any()


def test_arrays_that_do_not_fit_together_are_refused():
    hidden, head, *streams = _inputs()
    with pytest.raises(AssertionError):
        token_scores(hidden, head.T, *streams, chunk_tokens=4)
    with pytest.raises(AssertionError):
        token_scores(hidden[:, 1:], head, *streams, chunk_tokens=4)
    with pytest.raises(AssertionError, match="chunk_tokens"):
        token_scores(hidden, head, *streams, chunk_tokens=0)
