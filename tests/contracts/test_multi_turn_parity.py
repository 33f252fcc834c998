"""Conversations that the engine samples and the trainer scores: same tokens, same logprobs, over turns, branches and versions.

The engine prefills every turn anew and decodes from its cache; the trainer scores each branch whole, packed with others, in `grad_step`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest

from jaxrl.batching import rollout_to_samples, trainable_branches
from jaxrl.config.env import SamplingConfig
from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.engine import Engine
from jaxrl.envs.session import PolicySession
from jaxrl.inference.endpoint import NO_VERSION, GenerateRequest, Generation
from jaxrl.inference.rendering import Renderer
from jaxrl.trainer.loop import split_by_sample
from jaxrl.trainer.state import TrainState
from jaxrl.trainer.step import StepPrograms, densify
from jaxrl.types import Rollout, TrainingSample
from jaxrl.weights import WeightStore
from tests.envs.policies import RENDERER, make_rollout
from tests.trainer.tiny import SPEC, make_batch, make_config, make_params, make_programs

WINDOW = 256
TOKENIZED = dataclasses.replace(SPEC, vocab_size=RENDERER.num_ids, max_position_embeddings=WINDOW)
CONFIG = make_config(row_length=WINDOW)
FORGETFUL = Renderer(
    RENDERER.tokenizer,
    RENDERER.chat_template.replace("message['content']", "(message['content'] if loop.last or message['role'] == 'user' else 'forgotten')"),
    RENDERER.stop_ids,
)
"""Rewrites every earlier reply."""


def programs() -> StepPrograms:
    return make_programs(CONFIG, spec=TOKENIZED)


@functools.cache
def versions() -> list[TrainState]:
    """Return the trainer's state at versions 0 and 1."""
    params = make_params(TOKENIZED)
    return [programs().init_state(tree) for tree in (params, jax.tree.map(lambda leaf: 1.25 * leaf, params))]


class Ticking:
    """The engine as a pool: whoever waits for a reply makes it tick."""

    def __init__(self) -> None:
        self.store = WeightStore(TOKENIZED, "float32")
        for version, state in enumerate(versions()):
            self.store.publish(version, state.params)
        config = EmbeddedInferenceConfig(
            num_slots=4, max_model_len=WINDOW, prefill_rows=2, min_prefill_bucket=WINDOW, decode_steps_per_tick=1
        )
        self.engine = Engine(TOKENIZED, self.store.get(0), config, version=0)
        self.after_tick: Callable[[int], None] = lambda num_ticks: None
        """Called with the ticks that a reply has taken so far."""

    async def generate(self, request: GenerateRequest) -> Generation:
        future = self.engine.submit(request)
        for num_ticks in range(1, 200):
            self.engine.tick()
            self.after_tick(num_ticks)
            await asyncio.sleep(0)
            if future.done():
                return future.result(timeout=0)
        raise AssertionError("no reply after 200 ticks")

    async def score(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        raise NotImplementedError

    def swap(self) -> None:
        self.engine.load(self.store.get(1), 1)
        self.engine.tick()


def talk(pool: Ticking, rollout: Rollout, *, temperature: float = 1.0, renderer: Renderer = RENDERER) -> PolicySession:
    sampling = SamplingConfig(temperature=temperature, max_tokens=6)
    return PolicySession(pool, renderer, rollout, sampling, run_seed=0, seed_scope="toy", window=WINDOW)


async def ask(session: PolicySession, text: str) -> None:
    await session.ask([{"role": "user", "content": text}])


def trained(rollout: Rollout) -> tuple[list[TrainingSample], list[np.ndarray]]:
    """Return the samples of a rollout, and of each token the version that sampled it where it is trained, else `NO_VERSION`."""
    samples, origins = rollout.samples, []
    for sample, branch in zip(samples, trainable_branches(rollout), strict=True):
        parts = []
        for index in branch.path:
            node = rollout.nodes[index]
            told = node.versions if node.versions is not None else np.zeros(0, np.int32)
            parts.append(np.concatenate([np.full(len(node.token_ids) - len(told), NO_VERSION), told]))
        origins.append(np.where(sample.loss_mask, np.concatenate(parts), NO_VERSION))
    return samples, origins


def differences(version: int, rollout: Rollout) -> np.ndarray:
    """Return the trainer's minus the engine's logprob of every trained token that `version` sampled, by the trainer's weights `version`."""
    return differences_by(versions()[version], version, rollout)


def differences_by(state: TrainState, version: int, rollout: Rollout) -> np.ndarray:
    samples, origins = trained(rollout)
    batch = make_batch(samples, CONFIG)
    denominators, logprobs = programs().psum_denominators(batch.member_counts), []
    for micro_batch in batch.micro_batches:
        _, logprobs_BT = programs().grad_step(state, programs().zero_accumulator(), densify(micro_batch), denominators)
        logprobs.append(np.asarray(logprobs_BT))
    rows = zip(split_by_sample(batch, logprobs), samples, origins, strict=True)
    return np.concatenate([(ours - sample.inference_logprobs)[origin == version] for ours, sample, origin in rows])


def credit(rollout: Rollout) -> Rollout:
    rollout.samples = rollout_to_samples(rollout)
    rollout.assign_advantages(1.0)
    return rollout


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_turns_and_branches_agree(temperature: float) -> None:
    async def play(rollout: Rollout) -> None:
        session = talk(Ticking(), rollout, temperature=temperature)
        await ask(session, "8 + 3")
        await ask(session, "and 5")
        forks = [session.fork(), session.fork(), session.restart()]
        await asyncio.gather(ask(session, "so?"), *(ask(fork, "8 + 3") for fork in forks))
        await ask(forks[0], "more")

    rollout = make_rollout()
    asyncio.run(play(rollout))
    credit(rollout)
    num_sampled = sum(node.num_sampled for node in rollout.nodes)
    assert rollout.num_turns == 7 and len(rollout.samples) == 4
    assert sum(sample.loss_mask.sum() for sample in rollout.samples) == num_sampled, "each sampled token is trained once"
    found = differences(0, rollout)
    assert len(found) == num_sampled and np.abs(found).max() < 1e-5
    assert np.abs(differences_by(versions()[1], 0, rollout)).max() > 1e-3, "versions must differ, or agreement would show nothing"


def test_branches_of_a_history_that_the_template_rewrites_agree() -> None:
    async def play(rollout: Rollout) -> None:
        session = talk(Ticking(), rollout, renderer=FORGETFUL)
        for text in ("8 + 3", "and 5", "so?"):
            await ask(session, text)

    rollout = make_rollout()
    asyncio.run(play(rollout))
    credit(rollout)
    assert rollout.metrics["forks"] == 2 and len(rollout.samples) == 3
    found = differences(0, rollout)
    assert len(found) == sum(node.num_sampled for node in rollout.nodes) and np.abs(found).max() < 1e-5


def test_after_a_swap_between_turns_each_token_agrees_with_the_version_that_it_carries() -> None:
    async def play(rollout: Rollout) -> None:
        pool = Ticking()
        session = talk(pool, rollout)
        await ask(session, "8 + 3")
        fork = session.fork()
        pool.swap()
        await ask(session, "and 5")
        await ask(fork, "or 6")

    rollout = make_rollout()
    asyncio.run(play(rollout))
    credit(rollout)
    first, second, third = (node.versions for node in rollout.nodes if node.sampled)
    assert set(first.tolist()) == {0} and set(second.tolist()) == set(third.tolist()) == {1}
    old, new = differences(0, rollout), differences(1, rollout)
    assert len(old) == len(first) and len(new) == len(second) + len(third)
    assert np.abs(old).max() < 1e-5 and np.abs(new).max() < 1e-5
    assert np.abs(differences_by(versions()[0], 1, rollout)).max() > 1e-3


def test_a_swap_within_a_reply_divides_its_versions_where_it_came_and_the_next_turn_is_all_new() -> None:
    async def play(rollout: Rollout) -> None:
        pool = Ticking()
        pool.after_tick = lambda num_ticks: pool.swap() if num_ticks == 3 and pool.engine.version == 0 else None
        session = talk(pool, rollout)
        await ask(session, "8 + 3")
        await ask(session, "and 5")

    rollout = make_rollout()
    asyncio.run(play(rollout))
    credit(rollout)
    first, second = (node.versions for node in rollout.nodes if node.sampled)
    assert first.tolist() == [0, 0, 0, 1, 1, 1] and set(second.tolist()) == {1}
    assert np.abs(differences(0, rollout)).max() < 1e-5
    # What follows the swap in the same reply was sampled behind keys and values of the old version; the next turn was prefilled by the new.
    assert np.abs(differences(1, rollout)[-len(second) :]).max() < 1e-5
