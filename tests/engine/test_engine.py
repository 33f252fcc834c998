"""The engine against the full forward pass, and its rules of stopping, swapping and failing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.engine.cache import init_cache, insert_prompts
from jaxrl.engine.sampling import gumbel_noise
from jaxrl.engine.stops import MARGIN_TOKENS
from jaxrl.errors import DeadlineError, EngineError, PromptTooLongError
from jaxrl.inference.endpoint import FinishReason
from jaxrl.losses import token_scores
from jaxrl.models.decode import decode_step, prefill, to_decode_params
from jaxrl.trainer.compiles import num_compiles
from tests.engine.tiny import (
    MODEL,
    SPEC,
    WINDOW,
    decode_params,
    finish,
    full_logits,
    full_logprobs,
    generate,
    make_engine,
    make_request,
    trainer_params,
)
from tests.fakes import FakeClock

PROMPT = (3, 14, 15, 9, 26, 5, 35)


def crowd(num: int) -> list:
    """Return requests with prompts, seeds and settings of all kinds."""
    rng = np.random.default_rng(7)
    return [
        make_request(
            f"crowd-{i}",
            rng.integers(0, SPEC.vocab_size, rng.integers(1, 28)),
            max_tokens=int(rng.integers(1, 20)),
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([0, 5])),
            seed=int(rng.integers(2**62)),
        )
        for i in range(num)
    ]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_logprobs_are_those_of_the_full_forward_pass(temperature: float) -> None:
    engine = make_engine()
    requests = [make_request(f"r{n}", np.arange(2, 2 + n), max_tokens=20, temperature=temperature, seed=n) for n in (1, 2, 7, 17, 18, 31)]
    for request, result in zip(requests, generate(engine, *requests), strict=True):
        sequence = np.concatenate([request.token_ids, result.token_ids])
        expected = full_logprobs(sequence, temperature)[len(request.token_ids) :]
        assert len(result.token_ids) == min(20, WINDOW - len(request.token_ids))
        np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=1e-5)


def test_logprobs_are_those_that_the_trainer_computes_on_a_packed_row() -> None:
    requests = [make_request(f"r{n}", np.arange(2, 2 + n), max_tokens=9, temperature=0.6, seed=n) for n in (3, 6)]
    results = generate(make_engine(), *requests)
    parts = [np.concatenate([request.token_ids, result.token_ids]) for request, result in zip(requests, results, strict=True)]
    row = np.zeros((1, WINDOW), np.int32)
    segments, positions = row.copy(), row.copy()
    first = len(parts[0])
    row[0, : first + len(parts[1])] = np.concatenate(parts)
    segments[0, :first], segments[0, first : first + len(parts[1])] = 1, 2
    positions[0, :first], positions[0, first:] = np.arange(first), np.arange(WINDOW - first)

    @jax.jit
    def trainer_logprobs(params: dict) -> jax.Array:
        hidden = MODEL.hidden(params, row, positions, segments)
        temperatures = jnp.full(row.shape, 0.6)
        return token_scores(hidden, MODEL.head(params), row, segments, temperatures, chunk_tokens=16).logprobs[0]

    by_trainer = np.asarray(trainer_logprobs(trainer_params()))
    np.testing.assert_allclose(results[0].logprobs, by_trainer[3:first], rtol=0, atol=1e-5)
    np.testing.assert_allclose(results[1].logprobs, by_trainer[first + 6 : first + len(parts[1])], rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_tokens_are_the_argmax_of_the_full_forward_pass_plus_the_noise_of_seed_and_position(temperature: float) -> None:
    seed = (5 << 32) + 77
    (result,) = generate(make_engine(), make_request(prompt=PROMPT, max_tokens=20, temperature=temperature, seed=seed))
    scaled = full_logits(np.concatenate([PROMPT, result.token_ids]))[len(PROMPT) - 1 : -1] / temperature
    positions = np.arange(len(PROMPT), len(PROMPT) + 20)
    noise = jax.jit(gumbel_noise, static_argnums=2)(np.tile(np.array([[77, 5]], np.uint32), (20, 1)), positions, SPEC.vocab_size)
    assert result.token_ids.tolist() == (scaled + noise).argmax(axis=1).tolist()


def test_greedy_tokens_are_the_argmax_of_the_full_forward_pass() -> None:
    (result,) = generate(make_engine(), make_request(prompt=PROMPT, max_tokens=20, temperature=0.0))
    sequence = np.concatenate([PROMPT, result.token_ids])
    assert result.token_ids.tolist() == full_logits(sequence).argmax(axis=1)[len(PROMPT) - 1 : -1].tolist()


def test_text_and_logprobs_do_not_depend_on_slot_order_or_company() -> None:
    request = make_request("mine", PROMPT, max_tokens=20, seed=2**62 + 12345)
    (alone,) = generate(make_engine(), request)
    others = crowd(7)
    for requests in ([*others, request], [*others[:3], request, *others[3:]]):
        engine = make_engine()
        together = generate(engine, *requests)[requests.index(request)]
        assert together.token_ids.tolist() == alone.token_ids.tolist()
        assert together.logprobs.tobytes() == alone.logprobs.tobytes()


def test_text_does_not_depend_on_how_many_tokens_a_tick_decodes() -> None:
    requests = [make_request("mine", PROMPT, max_tokens=20, seed=5, stop_ids=(11,)), *crowd(12)]
    by_ones = generate(make_engine(), *requests)
    by_fours = generate(make_engine(decode_steps_per_tick=4), *requests)
    for one, four in zip(by_ones, by_fours, strict=True):
        assert one.token_ids.tolist() == four.token_ids.tolist()
        assert one.finish_reason == four.finish_reason
        np.testing.assert_allclose(one.logprobs, four.logprobs, rtol=0, atol=1e-5)


def test_members_of_a_group_with_different_seeds_differ_and_equal_seeds_agree() -> None:
    engine = make_engine()
    requests = [make_request(f"m{seed}", PROMPT, max_tokens=16, seed=seed) for seed in range(6)]
    results = generate(engine, *requests, make_request("again", PROMPT, max_tokens=16, seed=0))
    texts = [tuple(result.token_ids.tolist()) for result in results]
    assert len(set(texts[:6])) == 6
    assert texts[6] == texts[0]
    assert engine.stats()["prefill_tokens"] == len(PROMPT) - 1, "one prompt, computed once"


def test_alternatives_are_the_likeliest_tokens_of_the_full_forward_pass_and_change_nothing() -> None:
    engine = make_engine(max_logprobs=3)
    settings = [{"temperature": 0.7, "seed": 4}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 2, "seed": 4}]
    asked = [make_request(f"r{i}", PROMPT, max_tokens=9, **setting) for i, setting in enumerate(settings)]
    asked = [dataclasses.replace(request, num_top_logprobs=3 - i) for i, request in enumerate(asked)]
    plain = make_request("plain", PROMPT, max_tokens=9, temperature=0.7, seed=4)
    *results, without = generate(engine, *asked, plain)
    assert without.top_ids is None
    (by_training_engine,) = generate(make_engine(), plain)
    np.testing.assert_array_equal(without.token_ids, by_training_engine.token_ids)
    np.testing.assert_allclose(without.logprobs, by_training_engine.logprobs, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(results[0].token_ids, without.token_ids)
    for result, temperature in zip(results[:2], (0.7, 1.0), strict=True):
        logits = full_logits(np.concatenate([PROMPT, result.token_ids]))[len(PROMPT) - 1 : -1] / temperature
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        expected = np.argsort(-logits, axis=1)[:, : result.top_ids.shape[1]]
        np.testing.assert_array_equal(result.top_ids, expected)
        np.testing.assert_allclose(result.top_logprobs, np.take_along_axis(logprobs, expected, axis=1), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(results[1].top_ids[:, 0], results[1].token_ids)
    np.testing.assert_array_equal(results[1].top_logprobs[:, 0], results[1].logprobs)
    assert results[2].top_ids.shape == (9, 1)


def test_an_alternative_that_truncation_left_out_has_no_probability() -> None:
    request = dataclasses.replace(make_request(prompt=PROMPT, top_k=2, max_tokens=4, seed=1), num_top_logprobs=3)
    (result,) = generate(make_engine(max_logprobs=3), request)
    np.testing.assert_allclose(np.exp(result.top_logprobs[:, :2]).sum(axis=1), 1.0, rtol=1e-5)
    assert (result.top_logprobs[:, 2] == -np.inf).all()


@pytest.mark.parametrize("num_top", [-1, 4])
def test_more_alternatives_than_the_engine_was_built_for_are_refused(num_top: int) -> None:
    request = dataclasses.replace(make_request(), num_top_logprobs=num_top)
    with pytest.raises(EngineError, match=rf"must be in \[0, 3\] .*got {num_top}"):
        make_engine(max_logprobs=3).submit(request).result(timeout=0)
    with pytest.raises(EngineError, match=r"in \[0, 0\]"):
        make_engine().score_with_top(np.array([1, 2]), num_top=1).result(timeout=0)


def test_scores_with_alternatives_tell_ranks_and_the_likeliest_tokens() -> None:
    engine = make_engine(max_logprobs=3)
    sequence = np.array([*PROMPT, 1, 2])
    futures = [engine.score_with_top(sequence, num_top=2), engine.score(sequence), engine.score_with_top(sequence, 0.6, num_top=0)]
    finish(engine)
    scores, logprobs, tempered = (future.result(timeout=0) for future in futures)
    logits = full_logits(sequence)[:-1]
    by_likelihood = np.argsort(-logits, axis=1)
    np.testing.assert_allclose(scores.logprobs, full_logprobs(sequence), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(scores.ranks[1:], (by_likelihood == sequence[1:, None]).argmax(axis=1) + 1)
    np.testing.assert_array_equal(scores.top_ids[1:], by_likelihood[:, :2])
    np.testing.assert_allclose(scores.top_logprobs[1:, 0], logits.max(axis=1) - np.log(np.exp(logits).sum(axis=1)), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(logprobs, scores.logprobs)
    np.testing.assert_allclose(tempered.logprobs, full_logprobs(sequence, 0.6), rtol=0, atol=1e-5)
    assert tempered.top_ids.shape == (len(sequence), 0) and scores.ranks[0] == 0


@pytest.mark.parametrize("steps", [1, 4])
def test_whoever_follows_a_request_sees_every_token_once_before_its_end(steps: int) -> None:
    def decode_text(ids: list[int]) -> str:
        return "".join(chr(ord("0") + i) for i in ids)

    (free,) = generate(make_engine(), make_request(prompt=PROMPT, max_tokens=12, seed=3))
    stop = decode_text(free.token_ids.tolist())[5:7]
    engine = make_engine(decode_text=decode_text, decode_steps_per_tick=steps)
    seen: dict[str, list] = {"a": [], "b": []}
    futures = [
        engine.submit(make_request(name, PROMPT, max_tokens=12, seed=3, stop=stops), seen[name].append)
        for name, stops in (("a", ()), ("b", (stop,)))
    ]
    finish(engine)
    for name, future in zip("ab", futures, strict=True):
        result = future.result(timeout=0)
        assert len(seen[name]) == -(-len(result.token_ids) // steps)
        np.testing.assert_array_equal(np.concatenate([tokens.token_ids for tokens in seen[name]]), result.token_ids)
        np.testing.assert_array_equal(np.concatenate([tokens.logprobs for tokens in seen[name]]), result.logprobs)
    assert len(futures[1].result().token_ids) == 7


def test_a_stop_id_ends_the_completion_and_is_returned() -> None:
    (free,) = generate(make_engine(), make_request(prompt=PROMPT, max_tokens=12, seed=3))
    stop_id = int(free.token_ids[5])
    first = free.token_ids.tolist().index(stop_id)
    engine = make_engine()
    (result,) = generate(engine, make_request(prompt=PROMPT, max_tokens=12, seed=3, stop_ids=(60, 59, stop_id)))
    assert result.finish_reason == FinishReason.STOP
    assert result.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert engine.stats()["running"] == 0


@pytest.mark.parametrize("steps", [1, 4])
def test_a_stop_string_ends_the_completion_after_the_token_that_completes_it(steps: int) -> None:
    def decode_text(ids: list[int]) -> str:
        return "".join(chr(ord("0") + i) for i in ids)

    (free,) = generate(make_engine(decode_text=decode_text), make_request(prompt=PROMPT, max_tokens=12, seed=3))
    text = decode_text(free.token_ids.tolist())
    stop = text[4:6]
    at = text.index(stop)
    engine = make_engine(decode_text=decode_text, decode_steps_per_tick=steps)
    (result,) = generate(engine, make_request(prompt=PROMPT, max_tokens=12, seed=3, stop=("never", stop)))
    assert result.finish_reason == FinishReason.STOP
    assert result.token_ids.tolist() == free.token_ids[: at + 2].tolist()
    assert len(result.logprobs) == len(result.versions) == at + 2
    assert decode_text(result.token_ids.tolist()) == text[: at + 2]


def test_a_stop_string_is_found_at_the_end_of_a_long_reply_by_decoding_its_tail_only() -> None:
    lengths: list[int] = []

    def decode_text(ids: list[int]) -> str:
        lengths.append(len(ids))
        return "".join(chr(ord("0") + i) for i in ids)

    (free,) = generate(make_engine(), make_request(prompt=[5], max_tokens=31, seed=3))
    text = decode_text(free.token_ids.tolist())
    end = next(end for end in range(24, 32) if text.index(text[end - 3 : end]) == end - 3)
    lengths.clear()
    (result,) = generate(make_engine(decode_text=decode_text), make_request(prompt=[5], max_tokens=31, seed=3, stop=(text[end - 3 : end],)))
    assert (len(result.token_ids), result.finish_reason) == (end, FinishReason.STOP)
    assert max(lengths) == 3 + MARGIN_TOKENS


def test_stop_strings_without_text_are_refused() -> None:
    with pytest.raises(EngineError, match="decode_text"):
        make_engine().submit(make_request(stop=("x",))).result(timeout=0)


def test_max_tokens_and_the_window_end_a_completion_with_length() -> None:
    short, long = generate(make_engine(), make_request("a", PROMPT, max_tokens=4), make_request("b", PROMPT, max_tokens=10_000))
    assert (len(short.token_ids), short.finish_reason) == (4, FinishReason.LENGTH)
    assert (len(long.token_ids), long.finish_reason) == (WINDOW - len(PROMPT), FinishReason.LENGTH)


def test_a_prompt_that_fills_the_window_is_refused_with_the_numbers_and_the_fix() -> None:
    engine = make_engine()
    with pytest.raises(PromptTooLongError, match=r"prompt of 32 tokens .* window of 32; shorten it to 31 .* at least 33"):
        engine.submit(make_request(prompt=[1] * WINDOW)).result(timeout=0)
    (result,) = generate(engine, make_request(prompt=[1] * (WINDOW - 1), max_tokens=5))
    assert len(result.token_ids) == 1


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "P >= 1"),
        ([3, 61], {}, r"\[0, 61\)"),
        ([-1], {}, r"\[0, 61\)"),
        ([3], {"max_tokens": 0}, "max_tokens"),
        ([3], {"temperature": -0.1}, "temperature"),
        ([3], {"temperature": 2e-38}, "temperature"),
        ([3], {"temperature": 1e39}, "temperature"),
        ([3], {"stop": ("a", "")}, "stop"),
        ([3], {"stop": ("a\ufffd",)}, "stop"),
        ([3], {"top_p": 0.0}, "top_p"),
        ([3], {"min_p": 1.0}, "min_p"),
        ([3], {"top_k": -1}, "top_k"),
        ([3], {"seed": 2**63}, "seed"),
    ],
)
def test_senseless_requests_are_refused_by_name(prompt: list[int], settings: dict, message: str) -> None:
    engine = make_engine(decode_text=str)
    with pytest.raises(EngineError, match=message):
        engine.submit(make_request(prompt=prompt, **settings)).result(timeout=0)
    assert not engine.has_work()


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = make_engine()
    first, second = engine.submit(make_request("same")), engine.submit(make_request("same"))
    finish(engine)
    assert len(first.result(timeout=0).token_ids) == 8
    with pytest.raises(EngineError, match="'same' is in use"):
        second.result(timeout=0)
    generate(engine, make_request("same"))


def test_three_times_more_requests_than_slots_all_finish_as_they_would_alone() -> None:
    requests = crowd(24)
    for request, result in zip(requests, generate(make_engine(), *requests), strict=True):
        room = WINDOW - len(request.token_ids)
        assert len(result.token_ids) == min(request.sampling.max_tokens, room)
        (alone,) = generate(make_engine(), request)
        assert result.token_ids.tolist() == alone.token_ids.tolist()


def test_waiting_requests_get_slots_in_order_of_arrival() -> None:
    engine = make_engine(num_slots=1)
    order: list[str] = []
    for name in "cab":
        engine.submit(make_request(name, max_tokens=2)).add_done_callback(lambda _, name=name: order.append(name))
    finish(engine)
    assert order == ["c", "a", "b"]


def test_cancelling_returns_the_tokens_so_far_and_frees_the_slot() -> None:
    engine = make_engine(num_slots=1)
    running = engine.submit(make_request("running", PROMPT, max_tokens=20, seed=3))
    waiting = engine.submit(make_request("waiting", PROMPT))
    for _ in range(4):
        engine.tick()
    engine.cancel("running")
    engine.cancel("unknown")
    engine.tick()
    assert running.result(timeout=0).finish_reason == FinishReason.CANCELLED
    assert len(running.result(timeout=0).token_ids) == 4
    assert engine.stats()["running"] == 1, "the one that waited took the slot in the same tick"
    engine.cancel("waiting")
    late = engine.submit(make_request("late", max_tokens=1))
    engine.cancel("late")
    finish(engine)
    assert waiting.result(timeout=0).finish_reason == FinishReason.CANCELLED
    assert late.result(timeout=0).token_ids.size == 0


def test_pause_holds_running_requests_in_place_and_resume_goes_on() -> None:
    request = make_request(prompt=PROMPT, max_tokens=10, seed=4)
    (uninterrupted,) = generate(make_engine(), request)
    engine = make_engine()
    future = engine.submit(request)
    for _ in range(3):
        engine.tick()
    paused = engine.pause()
    engine.tick()
    assert paused.done() and not engine.has_work() and not future.done()
    before = engine.stats()["generated_tokens"]
    engine.submit(make_request("new"))
    finish(engine)
    assert engine.stats()["generated_tokens"] == before
    engine.resume()
    finish(engine)
    assert future.result(timeout=0).token_ids.tolist() == uninterrupted.token_ids.tolist()


def test_loading_works_while_paused_and_later_requests_use_the_new_weights() -> None:
    engine = make_engine(seed=0)
    engine.pause()
    loaded = engine.load(decode_params(seed=1), version=9)
    engine.resume()
    (result,) = generate(engine, make_request(prompt=PROMPT, max_tokens=12, seed=1))
    assert loaded.done() and engine.version == 9
    assert result.versions.tolist() == [9] * 12
    expected = full_logprobs(np.concatenate([PROMPT, result.token_ids]), seed=1)[len(PROMPT) :]
    np.testing.assert_allclose(result.logprobs, expected, rtol=0, atol=1e-5)


def test_a_swap_in_the_middle_keeps_the_cache_and_stamps_every_token() -> None:
    engine = make_engine(seed=0, version=3)
    future = engine.submit(make_request(prompt=PROMPT, max_tokens=10, seed=6))
    for _ in range(4):
        engine.tick()
    engine.load(decode_params(seed=1), version=4)
    finish(engine)
    result = future.result(timeout=0)
    assert result.versions.tolist() == [3] * 4 + [4] * 6
    # By hand: keys and values of the prompt and of the first tokens stay those of the old weights.
    prompt_kv = jax.jit(partial(prefill, spec=SPEC))(decode_params(0), np.array([PROMPT[:-1]], np.int32))
    to_slot_0 = np.zeros(1, np.int32)
    cache = jax.jit(insert_prompts)(init_cache(SPEC, 1, WINDOW, jnp.float32), prompt_kv, to_slot_0, to_slot_0)
    step = jax.jit(partial(decode_step, spec=SPEC))
    fed = [PROMPT[-1], *result.token_ids.tolist()]
    for t in range(10):
        weights = decode_params(0) if t < 4 else decode_params(1)
        logits, cache = step(weights, cache, np.array([fed[t]], np.int32), np.array([len(PROMPT) - 1 + t], np.int32))
        logits = np.asarray(logits[0], np.float64)
        assert abs(logits[fed[t + 1]] - np.log(np.exp(logits).sum()) - result.logprobs[t]) < 1e-5


def test_publishing_the_same_weights_changes_nothing_and_one_changed_weight_does() -> None:
    request = make_request(prompt=PROMPT, max_tokens=12, seed=2)
    engine = make_engine()
    (before,) = generate(engine, request)
    params = trainer_params()
    to_engine = jax.jit(to_decode_params, static_argnums=(1, 2))
    engine.load(to_engine(params, SPEC, "float32"), version=1)
    (same,) = generate(engine, request)
    assert same.token_ids.tolist() == before.token_ids.tolist()
    assert same.logprobs.tobytes() == before.logprobs.tobytes()
    kernel = params["layers"]["mlp"]["down_proj"]["kernel"].at[1, 7, 3].add(0.5)
    changed = {**params, "layers": {**params["layers"], "mlp": {**params["layers"]["mlp"], "down_proj": {"kernel": kernel}}}}
    engine.load(to_engine(changed, SPEC, "float32"), version=2)
    (after,) = generate(engine, request)
    assert after.logprobs[0] != before.logprobs[0]


def test_weights_of_another_shape_are_refused_and_the_old_ones_stay() -> None:
    engine = make_engine()
    wrong = jax.tree.map(lambda x: x.astype(jnp.bfloat16), decode_params())
    future = engine.load(wrong, version=1)
    finish(engine)
    with pytest.raises(EngineError, match=r"version 1 does not fit .*embed_VD is \(61, 32\) bfloat16, expected \(61, 32\) float32"):
        future.result(timeout=0)
    assert engine.version == 0
    generate(engine, make_request())


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_scores_are_those_of_the_full_forward_pass(temperature: float) -> None:
    engine = make_engine()
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, SPEC.vocab_size, n) for n in (1, 2, 15, 16, 17, 32, 5, 6, 7)]
    engine.pause()
    futures = [engine.score(sequence, temperature) for sequence in sequences]
    finish(engine)
    for sequence, future in zip(sequences, futures, strict=True):
        np.testing.assert_allclose(future.result(timeout=0), full_logprobs(sequence, temperature), rtol=0, atol=1e-5)
    assert engine.stats()["scored_tokens"] == sum(map(len, sequences))
    # Bit for bit the same in any other company: alone, and among others, in another order and place of the batch.
    alone = engine.score(sequences[4], temperature)
    finish(engine)
    again = [engine.score(sequence, temperature) for sequence in reversed(sequences)]
    finish(engine)
    np.testing.assert_array_equal(alone.result(timeout=0), futures[4].result(timeout=0))
    for future, other in zip(futures, reversed(again), strict=True):
        np.testing.assert_array_equal(future.result(timeout=0), other.result(timeout=0))


@pytest.mark.parametrize(("token_ids", "temperature"), [([], 1.0), ([1] * 33, 1.0), ([[1]], 1.0), ([61], 1.0), ([1], 0.0)])
def test_senseless_scores_are_refused(token_ids: list, temperature: float) -> None:
    with pytest.raises(EngineError, match="score"):
        make_engine().score(np.array(token_ids, np.int32), temperature).result(timeout=0)


def test_a_request_past_its_deadline_fails_and_says_what_the_engine_was_doing() -> None:
    clock = FakeClock()
    engine = make_engine(num_slots=1, request_deadline_s=10.0, clock=clock)
    running, waiting = engine.submit(make_request("running", max_tokens=20)), engine.submit(make_request("waiting"))
    engine.tick()
    engine.pause()
    finish(engine)
    clock.advance(10.0)
    assert engine.has_work(), "a paused engine still has deadlines to keep"
    finish(engine)
    with pytest.raises(DeadlineError, match=r"'running' did not finish within .*=10 s: it had sampled 1 tokens; engine paused, .*1 of 1"):
        running.result(timeout=0)
    with pytest.raises(DeadlineError, match="waiting for a slot"):
        waiting.result(timeout=0)
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_logits_that_are_not_finite_fail_the_request_and_not_the_engine() -> None:
    engine = make_engine(num_slots=1)
    broken = jax.tree.map(lambda x: x * jnp.nan, decode_params())
    engine.load(broken, version=5)
    # Longer than what comes next in its slot: the columns after that one's prompt are what this one leaves behind.
    future = engine.submit(make_request(prompt=range(1, 25)))
    finish(engine)
    with pytest.raises(EngineError, match="logits of version 5 are not finite"):
        future.result(timeout=0)
    engine.load(decode_params(), version=6)
    (result,) = generate(engine, make_request(prompt=PROMPT, seed=1))
    assert result.logprobs.tobytes() == generate(make_engine(num_slots=1), make_request(prompt=PROMPT, seed=1))[0].logprobs.tobytes()


def test_an_exception_in_a_tick_reaches_every_waiter_and_later_requests() -> None:
    def explode(ids: list[int]) -> str:
        raise RuntimeError("no such id")

    engine = make_engine(num_slots=1, decode_text=explode)
    futures = [engine.submit(make_request(name, max_tokens=1, stop=("x",))) for name in "ab"]
    with pytest.raises(RuntimeError, match="no such id"):
        finish(engine)
    late = [engine.submit(make_request("late")), engine.score(np.array([1])), engine.load(decode_params(), version=1), engine.resume()]
    finish(engine)
    for future in (*futures, *late):
        with pytest.raises(EngineError, match="no such id"):
            future.result(timeout=0)


def test_what_is_asked_in_the_instant_of_the_failure_is_answered_though_no_tick_follows() -> None:
    """The clock is read between the look at the engine's state and the inbox; there the last tick fits in."""
    moments: list[Callable[[], object]] = []

    def clock() -> float:
        if moments:
            with pytest.raises(RuntimeError, match="no such id"):
                moments.pop()()
        return 0.0

    def explode(ids: list[int]) -> str:
        raise RuntimeError("no such id")

    engine = make_engine(num_slots=1, decode_text=explode, clock=clock)
    first = engine.submit(make_request(max_tokens=1, stop=("x",)))
    moments.append(partial(finish, engine))
    late = engine.submit(make_request("late"))
    for future in (first, late, engine.load(decode_params(), version=1)):
        with pytest.raises(EngineError, match="no such id"):
            future.result(timeout=0)
    engine.cancel("late")
    assert not engine.has_work()


def test_a_cancelled_score_is_not_computed() -> None:
    engine = make_engine()
    futures = [engine.score(np.arange(3)) for _ in range(3)]
    assert futures[0].cancel() and futures[2].cancel()
    finish(engine)
    assert len(futures[1].result(timeout=0)) == 3
    assert engine.stats()["scored_tokens"] == 3


def test_nothing_compiles_after_warm_up() -> None:
    before = num_compiles()
    # Shapes that no other test uses: every program must be compiled by the warm-up of this engine.
    engine = make_engine(num_slots=5, prefill_rows=3)
    progress: list[tuple[str, int, int]] = []
    engine.warm_up(lambda *args: progress.append(args))
    assert [done for _, done, _ in progress] == list(range(engine.num_programs))
    assert any(name.startswith("score") for name, _, _ in progress)
    unscored: list[str] = []
    engine.warm_up(lambda name, *_: unscored.append(name), includes_scoring=False)
    assert unscored == [name for name, _, _ in progress if not name.startswith("score")]
    assert {total for _, _, total in progress} == {engine.num_programs}
    assert num_compiles() - before >= len(progress)
    other = decode_params(seed=1)
    warm = num_compiles()
    futures = [engine.submit(request) for request in crowd(30)]
    scores = [engine.score(np.arange(n)) for n in range(1, WINDOW + 1)]
    engine.tick()
    engine.load(other, version=1)
    engine.cancel("crowd-3")
    finish(engine)
    assert all(future.done() for future in (*futures, *scores))
    assert num_compiles() == warm


def test_near_ties_are_counted() -> None:
    engine = make_engine()
    flat = jax.tree.map(jnp.zeros_like, decode_params())
    engine.load(flat, version=1)
    generate(engine, make_request(max_tokens=6, temperature=0.0))
    assert engine.stats()["near_ties"] == 6
    engine = make_engine()
    generate(engine, make_request(max_tokens=6, temperature=0.0))
    assert engine.stats()["near_ties"] == 0


def test_warm_up_leaves_no_trace() -> None:
    request = make_request(prompt=PROMPT, seed=8)
    (cold,) = generate(make_engine(), request)
    engine = make_engine()
    engine.warm_up()
    (warm,) = generate(engine, request)
    assert warm.token_ids.tolist() == cold.token_ids.tolist() and warm.logprobs.tobytes() == cold.logprobs.tobytes()
    assert engine.stats()["generated_tokens"] == 8
