"""The engine and the trainer are one policy: same tokens, same version, same logprobs; and the meter that says when they are not.

The engine's logprobs come from its cached decode steps, the trainer's from the compiled packed forward of `grad_step`; weights
travel as in a run: the real programs donate their state, the real store publishes it.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.engine import Engine
from jaxrl.inference.endpoint import GenerateRequest, TokenSampling
from jaxrl.models.transformer import Params
from jaxrl.trainer.loop import split_by_sample
from jaxrl.trainer.state import TrainState
from jaxrl.trainer.step import densify
from jaxrl.types import TrainingSample
from jaxrl.weights import WeightStore
from tests.engine.tiny import generate
from tests.trainer.tiny import ROW_LENGTH, SPEC, make_batch, make_config, make_programs, make_state, take_step

CONFIG = make_config()
TEMPERATURES = (0.6, 1.0)


def perturbed(params: Params) -> Params:
    """Return a copy with one weight of one kernel changed."""
    kernel = params["layers"]["mlp"]["down_proj"]["kernel"].at[1, 7, 3].add(2.0)
    return {**params, "layers": {**params["layers"], "mlp": {**params["layers"]["mlp"], "down_proj": {"kernel": kernel}}}}


def serve(store: WeightStore, version: int) -> Engine:
    """Return an engine of six slots on a published version."""
    return Engine(SPEC, store.get(version), EmbeddedInferenceConfig(num_slots=6, max_model_len=ROW_LENGTH, prefill_rows=4), version=version)


def requests(seed: int, num: int) -> list[GenerateRequest]:
    """Return requests of all lengths at both temperatures: more than there are slots, so that company changes while they run."""
    rng = np.random.default_rng(seed)
    return [
        GenerateRequest(
            f"{seed}/{i}",
            rng.integers(1, SPEC.vocab_size, rng.integers(1, 9)).astype(np.int32),
            TokenSampling(max_tokens=int(rng.integers(1, 8)), temperature=TEMPERATURES[i % 2], seed=int(rng.integers(2**62))),
        )
        for i in range(num)
    ]


def play(engine: Engine, seed: int, num: int = 13) -> list[TrainingSample]:
    """Let the engine answer, and return what it sampled as samples with credit."""
    asked = requests(seed, num)
    samples = []
    for request, reply in zip(asked, generate(engine, *asked), strict=True):
        assert set(reply.versions.tolist()) == {engine.version}
        num_prompt, num_reply = len(request.token_ids), len(reply.token_ids)
        is_sampled = np.arange(num_prompt + num_reply) >= num_prompt
        before = np.zeros(num_prompt, np.float32)
        samples.append(
            TrainingSample(
                token_ids=np.concatenate([request.token_ids, reply.token_ids]),
                loss_mask=is_sampled,
                inference_logprobs=np.concatenate([before, reply.logprobs]),
                temperatures=np.where(is_sampled, request.sampling.temperature, 1.0).astype(np.float32),
                env_name="toy",
                advantages=np.where(is_sampled, (-1.0) ** len(samples), 0.0).astype(np.float32),
            )
        )
    return samples


def differences(state: TrainState, samples: list[TrainingSample]) -> np.ndarray:
    """Return the trainer's minus the engine's logprob of every sampled token, from the compiled `grad_step`."""
    programs, batch = make_programs(CONFIG), make_batch(samples, CONFIG)
    assert len(batch.micro_batches) > 1, "samples share rows and are spread over micro-batches"
    assert max(micro_batch.segment_ids.max() for micro_batch in batch.micro_batches) > 1
    denominators, logprobs = programs.psum_denominators(batch.member_counts), []
    for micro_batch in batch.micro_batches:
        _, logprobs_BT = programs.grad_step(state, programs.zero_accumulator(), densify(micro_batch), denominators)
        logprobs.append(np.asarray(logprobs_BT))
    pairs = zip(split_by_sample(batch, logprobs), samples, strict=True)
    return np.concatenate([(ours - sample.inference_logprobs)[sample.loss_mask] for ours, sample in pairs])


def test_engine_and_trainer_agree_at_both_temperatures_in_any_company_at_the_start_and_after_every_swap() -> None:
    programs = make_programs(CONFIG)
    state, store = make_state(programs), WeightStore(SPEC, "float32")
    store.publish(0, state.params)
    engine = serve(store, 0)
    for version in range(3):
        samples = play(engine, seed=version)
        assert {float(t) for sample in samples for t in sample.temperatures[sample.loss_mask]} == set(np.float32(TEMPERATURES).tolist())
        assert np.abs(differences(state, samples)).max() < 1e-5
        state, _ = take_step(programs, state, make_batch(samples, CONFIG, version + 1))
        assert np.abs(differences(state, samples)).max() > 1e-3, "versions must differ, or agreement after a swap would show nothing"
        store.publish(version + 1, state.params)
        engine.load(store.get(version + 1), version + 1)
        engine.tick()


@pytest.mark.parametrize("is_perturbed", [False, True])
def test_the_mismatch_meter_is_zero_for_equal_weights_and_rises_when_one_weight_of_the_engine_differs(is_perturbed: bool) -> None:
    programs = make_programs(CONFIG)
    state, store = make_state(programs), WeightStore(SPEC, "float32")
    store.publish(0, perturbed(state.params) if is_perturbed else state.params)
    _, metrics = take_step(programs, state, make_batch(play(serve(store, 0), seed=9), CONFIG))
    assert metrics["tokens/rl"] > 30
    if is_perturbed:
        assert metrics["mismatch/kl/mean"] > 1e-5 and metrics["mismatch/ratio/max"] > 1.01
    else:
        assert metrics["mismatch/kl/mean"] < 1e-9 and metrics["mismatch/ratio/max"] < 1 + 1e-5


def test_the_engine_decodes_on_one_version_while_the_real_programs_make_two_more() -> None:
    programs = make_programs(CONFIG)
    state, store = make_state(programs), WeightStore(SPEC, "float32")
    store.publish(0, state.params)
    asked = requests(seed=4, num=6)
    undisturbed = generate(serve(store, 0), *asked)
    samples = play(serve(store, 0), seed=5)
    engine = serve(store, 0)
    futures = [engine.submit(request) for request in asked]
    for version in (1, 2):
        engine.tick()
        given_up = state.params
        state, _ = take_step(programs, state, make_batch(samples, CONFIG, version))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given_up)), "the trainer gave up the memory of the version before"
        engine.tick()
        store.publish(version, state.params)
    assert not all(future.done() for future in futures), "the replies go on beyond both updates"
    while engine.has_work():
        engine.tick()
    for future, expected in zip(futures, undisturbed, strict=True):
        reply = future.result(timeout=0)
        assert reply.token_ids.tolist() == expected.token_ids.tolist()
        assert reply.logprobs.tobytes() == expected.logprobs.tobytes()
        assert set(reply.versions.tolist()) == {0}
    engine.load(store.get(2), 2)
    assert [r.logprobs.tobytes() for r in generate(engine, *asked)] != [r.logprobs.tobytes() for r in undisturbed]
