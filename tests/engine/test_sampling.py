"""Token sampling against numpy: the distribution, its logprob, the truncations, the noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.engine.sampling import SamplingArrays, gumbel_noise, kept_tokens, sample_tokens

NUM_SLOTS, NUM_TOKENS = 64, 7
sample = jax.jit(sample_tokens)
keep = jax.jit(kept_tokens)
noise = jax.jit(gumbel_noise, static_argnames="num_tokens")


def settings_of(
    num_slots: int = NUM_SLOTS,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    first_seed: int = 0,
) -> SamplingArrays:
    """Return equal settings for every slot, with seeds of their own."""
    seeds = [first_seed + i for i in range(num_slots)]
    return SamplingArrays(
        temperature_S=np.full(num_slots, temperature, np.float32),
        top_k_S=np.full(num_slots, top_k, np.int32),
        top_p_S=np.full(num_slots, top_p, np.float32),
        min_p_S=np.full(num_slots, min_p, np.float32),
        seed_S2=np.array([[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds], np.uint32),
    )


def reference_distribution(logits_V: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Return [V] float64 probabilities after temperature, min-p, top-k and top-p, token by token."""
    scaled = np.asarray(logits_V, np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = [token for token in order if probs[token] >= min_p * probs.max()]
    kept = kept[:top_k] if top_k else kept
    mass = sum(probs[token] for token in kept)
    nucleus, reached = [], 0.0
    for token in kept:
        if top_p < 1 and reached >= top_p:
            break
        nucleus.append(token)
        reached += probs[token] / mass
    result = np.zeros(len(probs))
    result[nucleus] = probs[nucleus] / probs[nucleus].sum()
    return result


LOGITS = np.array([1.0, 2.5, -1.0, 2.0, 0.3, -3.0, 1.9], np.float32)


@pytest.mark.parametrize(
    "cut",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 3},
        {"top_k": 1},
        {"top_k": 99},
        {"top_p": 0.7},
        {"top_p": 1e-6},
        {"min_p": 0.5},
        {"min_p": 0.3, "top_k": 3, "top_p": 0.8, "temperature": 1.7},
    ],
)
def test_samples_follow_the_reference_distribution_and_carry_its_logprob(cut: dict) -> None:
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | cut
    expected = reference_distribution(LOGITS, **full)
    counts = np.zeros(NUM_TOKENS)
    logits = np.broadcast_to(LOGITS, (NUM_SLOTS, NUM_TOKENS))
    for draw in range(40):
        sampled = sample(logits, np.arange(NUM_SLOTS, dtype=np.int32) + draw, settings_of(**cut, first_seed=10**6 * draw))
        tokens = np.asarray(sampled.token_ids_S)
        counts += np.bincount(tokens, minlength=NUM_TOKENS)
        assert (expected[tokens] > 0).all()
        np.testing.assert_allclose(sampled.logprobs_S, np.log(expected[tokens]), rtol=0, atol=2e-6)
    is_possible = expected > 0
    num_draws = counts.sum()
    chi_square = ((counts - num_draws * expected)[is_possible] ** 2 / (num_draws * expected[is_possible])).sum()
    # 2560 fixed draws; the 99.9% quantile of chi-square with six degrees of freedom.
    assert chi_square < 22.5


@settings(max_examples=25, deadline=None)
@given(
    logits=st.lists(st.integers(-20, 20), min_size=NUM_TOKENS, max_size=NUM_TOKENS),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([0.05, 0.31, 0.66, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.43, 0.99]),
)
def test_kept_tokens_are_those_of_the_reference_also_where_logits_are_equal(
    logits: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    logits_V = np.array(logits, np.float32) / 4
    kept = keep(logits_V[None], settings_of(1, top_k=top_k, top_p=top_p, min_p=min_p))
    expected = reference_distribution(logits_V, 1.0, top_k, top_p, min_p) > 0
    assert np.asarray(kept[0]).tolist() == expected.tolist()


def test_temperature_zero_takes_the_lowest_of_the_likeliest_tokens_and_ignores_truncation() -> None:
    logits = np.array([[0.0, 3.0, 1.0, 3.0], [0.0, 3.0, 1.0, 3.0]], np.float32)
    both_cut = settings_of(2, top_k=1)
    both_cut.temperature_S[0] = 0.0
    sampled = sample(logits, np.zeros(2, np.int32), both_cut)
    assert np.asarray(sampled.token_ids_S).tolist() == [1, 1]
    assert float(sampled.logprobs_S[0]) == pytest.approx(3.0 - np.log(np.exp([0.0, 3.0, 1.0, 3.0]).sum()), abs=1e-6)
    assert float(sampled.logprobs_S[1]) == 0.0
    assert np.asarray(sampled.is_near_tie_S).tolist() == [True, False]


def test_a_neighbour_that_truncates_changes_no_bit_of_a_slot() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(NUM_SLOTS, NUM_TOKENS)).astype(np.float32)
    positions = np.arange(NUM_SLOTS, dtype=np.int32)
    alone = sample(logits, positions, settings_of())
    mixed_settings = settings_of()
    mixed_settings.top_k_S[1::2] = 2
    mixed = sample(logits, positions, mixed_settings)
    assert np.asarray(alone.token_ids_S)[::2].tolist() == np.asarray(mixed.token_ids_S)[::2].tolist()
    assert np.asarray(alone.logprobs_S)[::2].tobytes() == np.asarray(mixed.logprobs_S)[::2].tobytes()
    assert np.asarray(alone.logprobs_S).tobytes() != np.asarray(mixed.logprobs_S).tobytes()


def test_a_near_tie_is_flagged_and_a_clear_win_is_not() -> None:
    logits = np.array([[1.0, 1.00005, 0.0], [1.0, 1.0002, 0.0]], np.float32)
    sampled = sample(logits, np.zeros(2, np.int32), settings_of(2, temperature=0.0))
    assert np.asarray(sampled.is_near_tie_S).tolist() == [True, False]


def test_noise_depends_on_each_half_of_the_seed_and_on_the_position_and_on_nothing_else() -> None:
    seeds = np.array([[1, 0], [0, 1], [1, 0], [1, 0], [1, 0]], np.uint32)
    positions = np.array([5, 5, 6, 5, 0], np.int32)
    rows = np.asarray(noise(seeds, positions, num_tokens=5))
    assert rows[0].tobytes() == rows[3].tobytes()
    distinct = {rows[i].tobytes() for i in (0, 1, 2, 4)}
    assert len(distinct) == 4
    assert len(np.unique(rows)) == 4 * 5
    assert np.asarray(noise(seeds[:1], positions[:1], num_tokens=5))[0].tobytes() == rows[0].tobytes()


def test_noise_is_standard_gumbel() -> None:
    seeds = settings_of(128).seed_S2
    values = np.asarray(noise(seeds, np.full(128, 3, np.int32), num_tokens=256)).ravel()
    assert np.isfinite(values).all()
    # 32,768 fixed draws; mean is Euler's constant, variance pi^2 / 6.
    assert values.mean() == pytest.approx(0.5772, abs=0.03)
    assert values.var() == pytest.approx(np.pi**2 / 6, rel=0.05)
    assert (values > 8).mean() == pytest.approx(1 - np.exp(-np.exp(-8)), abs=3e-4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_show_in_the_logprob(bad: float) -> None:
    logits = np.full((1, 4), bad, np.float32)
    sampled = sample(logits, np.zeros(1, np.int32), settings_of(1))
    assert not np.isfinite(sampled.logprobs_S[0])
    assert 0 <= int(sampled.token_ids_S[0]) < 4


def test_op_by_op_the_tokens_and_noise_are_those_of_the_compiled_function() -> None:
    logits = np.random.default_rng(1).normal(size=(NUM_SLOTS, NUM_TOKENS)).astype(np.float32)
    positions, mixed = np.arange(NUM_SLOTS, dtype=np.int32), settings_of(temperature=0.7, top_k=4, min_p=0.01)
    eager, compiled = sample_tokens(jnp.asarray(logits), positions, mixed), sample(logits, positions, mixed)
    assert np.asarray(eager.token_ids_S).tolist() == np.asarray(compiled.token_ids_S).tolist()
    np.testing.assert_allclose(eager.logprobs_S, compiled.logprobs_S, rtol=0, atol=2e-6)
    np.testing.assert_allclose(gumbel_noise(mixed.seed_S2, positions, 5), noise(mixed.seed_S2, positions, num_tokens=5), rtol=1e-6)


@pytest.mark.parametrize(
    ("logits", "positions"),
    [
        (np.zeros(NUM_TOKENS, np.float32), np.zeros(1, np.int32)),
        (np.zeros((2, NUM_TOKENS), np.float32), np.zeros(1, np.int32)),
        (np.zeros((1, NUM_TOKENS), np.int32), np.zeros(1, np.int32)),
        (np.zeros((1, NUM_TOKENS), np.float32), np.zeros(1, np.float32)),
    ],
)
def test_logits_and_positions_of_another_rank_shape_or_dtype_are_refused(logits: np.ndarray, positions: np.ndarray) -> None:
    with pytest.raises(AssertionError):
        sample(logits, positions, settings_of(1))
    with pytest.raises(AssertionError):
        keep(logits[0], settings_of(1))
    with pytest.raises(AssertionError):
        noise(np.zeros((1, 2), np.int32), np.zeros(1, np.int32), num_tokens=5)
