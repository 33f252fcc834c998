"""Environments with different algorithms in one optimizer step: from their rollouts to the gradient, on the real programs.

What holds, and is tested here:

1. Samples of all algorithms share rows and micro-batches, and the objective is the sum of what each algorithm's samples give
   alone under the step's denominators.
2. An added ce environment leaves the rl gradient unchanged: bit for bit when the rl samples stand where they stood before,
   in micro-batches of their own or beside ce samples in what was padding. Where the packer lays the rl samples elsewhere,
   the gradient is the same sum in another order, so it differs by rounding and by nothing else.
3. It changes another environment's ce term by the ratio of the member counts.
4. A coefficient scales its component's term, and no other, and no count.

The gradient of one component is read off the compiled step by giving the other two infinite denominators: their shares, and
what flows back through them, are then exact zeros.
"""

from collections.abc import Sequence

import jax
import numpy as np
import pytest

from jaxrl.config.algorithm import CoefficientsConfig, GRPOConfig, OPDConfig, SFTConfig
from jaxrl.losses import finish_metrics
from jaxrl.orchestrator.algo import AlgorithmContext, build_algorithm
from jaxrl.trainer.step import densify
from jaxrl.types import COMPONENTS, MicroBatch, TrainingSample
from tests.builders import make_micro_batch, make_rollout
from tests.trainer.tiny import ROW_LENGTH, SPEC, make_batch, make_config, make_programs, make_state, to_host

CONFIG = make_config()
CONFIGS = {
    "rl": GRPOConfig(),
    "ref_kl": OPDConfig(teacher={"name": "teacher", "base_url": ["http://localhost:1/v1"]}),
    "ce": SFTConfig(sampling={"source": "demonstrations"}),
}
"""An algorithm for each component."""


class Teacher:
    """A frozen model with an opinion on every sequence."""

    async def score(self, token_ids, temperature=1.0):
        """Score each token from the sequence up to it."""
        scores = -3.5 - np.cumsum(token_ids) % 7 / 7
        return np.concatenate([[0.0], scores[1:]]).astype(np.float32)


async def credited(component: str, lengths: Sequence[int], seed: int = 0, **coefficients: float) -> list[TrainingSample]:
    """Return the stamped samples of one group of an environment, of three prompt tokens and so many sampled ones."""
    rng = np.random.default_rng(seed)
    is_policy = component != "ce"
    rollouts = []
    for member, length in enumerate(lengths):
        prompt, reply = rng.integers(1, SPEC.vocab_size, 3), rng.integers(1, SPEC.vocab_size, length)
        rollout = make_rollout(
            float(member % 2),
            turns=[(prompt, reply)],
            env_name=component,
            member=member,
            version=0 if is_policy else None,
            logprob=-4.0 if is_policy else None,
            temperature=0.8 if is_policy else 1.0,
        )
        if is_policy:
            rollout.samples[0].inference_logprobs[3:] += 0.3 * rng.normal(size=length).astype(np.float32)
        rollouts.append(rollout)
    algorithm = build_algorithm(CONFIGS[component], Teacher(), AlgorithmContext(coefficients=CoefficientsConfig(**coefficients)))
    algorithm.teacher = Teacher()
    for rollout in rollouts:
        await algorithm.finalize_rollout(rollout)
    await algorithm.finalize_group(rollouts)
    assert [rollout.failure for rollout in rollouts] == [None] * len(rollouts)
    return [sample for rollout in rollouts for sample in rollout.samples]


async def mixed() -> dict[str, list[TrainingSample]]:
    """Return samples of all three environments; two of one never fill a row."""
    return {
        "rl": await credited("rl", (6, 3, 5, 2), seed=1),
        "ref_kl": await credited("ref_kl", (4, 7), seed=2),
        "ce": await credited("ce", (3, 5), seed=3),
    }


def step(micro_batches: Sequence[MicroBatch], denominators: Sequence[float] | np.ndarray):
    """Return gradient and metrics of a step under these denominators, and its logprobs per micro-batch."""
    programs = make_programs(CONFIG)
    state, accumulator = make_state(programs), programs.zero_accumulator()
    on_device, logprobs = jax.device_put(np.asarray(denominators, np.float32)), []
    for micro_batch in micro_batches:
        accumulator, scored = programs.grad_step(state, accumulator, densify(micro_batch), on_device)
        logprobs.append(np.array(scored))
    metrics = {name: float(value) for name, value in finish_metrics(accumulator.metrics).items()}
    return to_host(accumulator.grads), metrics, logprobs


def counts_of(*samples: Sequence[TrainingSample]) -> np.ndarray:
    """Return the step's denominators as the trainer makes them from what the packer counted."""
    batch = make_batch([sample for part in samples for sample in part], CONFIG)
    return np.array(make_programs(CONFIG).psum_denominators(batch.member_counts))


def only(component: str, denominators: Sequence[float]) -> list[float]:
    """Return the denominators that leave nothing but one component."""
    return [float(count) if name == component else np.inf for name, count in zip(COMPONENTS, denominators, strict=True)]


def packed(samples: Sequence[TrainingSample]) -> list[MicroBatch]:
    return make_batch(samples, CONFIG).micro_batches


def laid(*rows: Sequence[TrainingSample]) -> MicroBatch:
    """Return a micro-batch laid out by hand."""
    return make_micro_batch(rows, length=ROW_LENGTH, max_segments=4)


def assert_equal(found, expected):
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 1e-4
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_close(found, expected):
    """Equal but for the order in which float32 sums were taken: 5e-7 of the largest element was seen."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=5e-6 * np.abs(y).max()), found, expected)


def scaled(tree, factor: float):
    return jax.tree.map(lambda leaf: leaf * np.float32(factor), tree)


async def test_a_mixed_batch_is_the_sum_of_its_algorithms_under_the_shared_denominators():
    samples = await mixed()
    every = [sample for i in range(4) for part in samples.values() for sample in part[i : i + 1]]
    micro_batches = packed(every)
    names = [[{every[i].env_name for i in row if i >= 0} for row in batch.sample_index] for batch in micro_batches]
    assert any(set.union(*rows) == set(samples) for rows in names), "all three share a micro-batch"
    assert any(len(row) > 1 for rows in names for row in rows), "and two of them a row"
    denominators = counts_of(every)
    assert denominators.tolist() == [16, 8, 11]
    grads, metrics, _ = step(micro_batches, denominators)
    alone = {name: step(packed(part), denominators) for name, part in samples.items()}
    assert_close(grads, jax.tree.map(lambda *parts: sum(parts), *(part for part, _, _ in alone.values())))
    assert metrics["loss/total"] == pytest.approx(sum(part["loss/total"] for _, part, _ in alone.values()), rel=1e-6)
    for component in COMPONENTS:
        assert metrics[f"loss/{component}"] == pytest.approx(alone[component][1]["loss/total"], rel=1e-6)
        assert metrics[f"tokens/{component}"] == denominators[COMPONENTS.index(component)]
        assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(alone[component][0])) > 1e-3


async def test_the_loss_of_a_mixed_batch_is_what_the_formulas_say_in_float64():
    every = [sample for part in (await mixed()).values() for sample in part]
    micro_batches, denominators = packed(every), counts_of(every)
    _, metrics, tempered = step(micro_batches, denominators)
    for micro_batch in micro_batches:
        micro_batch.temperatures[:] = 1.0
    _, _, raw = step(micro_batches, denominators)
    sums = dict.fromkeys(COMPONENTS, 0.0)
    for micro_batch, tempered_BT, raw_BT in zip(micro_batches, tempered, raw, strict=True):
        arrays = {name: np.asarray(array, np.float64) for name, array in densify(micro_batch).items()}
        log_ratio = np.float64(tempered_BT) - arrays["inference_logprobs"]
        gap = np.exp(np.float64(tempered_BT)) - np.exp(arrays["inference_logprobs"])
        credit = arrays["advantages"]
        kept = np.where(credit > 0, gap <= 0.2, gap >= -0.2)
        terms = {
            "rl": arrays["loss_mask"] * (-1.0 * kept * credit * np.exp(log_ratio) + 1e-3 * log_ratio**2),
            "ce": -np.float64(raw_BT),
            "ref_kl": -1.0 * (gap >= -0.2) * (arrays["ref_logprobs"] - raw_BT) * np.exp(log_ratio) + 1e-3 * log_ratio**2,
        }
        for name, term in terms.items():
            weights = arrays[f"{name}_weights"]
            sums[name] += (weights * np.where(weights != 0, term, 0.0)).sum()
    shares = {name: sums[name] / count for name, count in zip(COMPONENTS, denominators, strict=True)}
    assert {name: metrics[f"loss/{name}"] for name in COMPONENTS} == pytest.approx(shares, rel=1e-5)
    assert metrics["loss/total"] == pytest.approx(sum(shares.values()), rel=1e-5)


async def test_an_added_ce_environment_leaves_the_rl_gradient_unchanged():
    samples = await mixed()
    (first, second, third, fourth), imitated = samples["rl"], samples["ce"]
    count = counts_of(samples["rl"])[0]
    assert counts_of(samples["rl"], imitated)[0] == count, "it has no part in the rl denominator"
    rl_alone = [laid([first], [second]), laid([third], [fourth])]
    before, _, _ = step(rl_alone, only("rl", (count, 1, 1)))
    # The share of the rl samples' micro-batches does not know how many ce tokens the step has.
    assert_equal(step(rl_alone, (count, 8, 1))[0], before)
    # Micro-batches of its own, before or after the rl samples'.
    own = [laid([imitated[0]], [imitated[1]])]
    for micro_batches in ([*rl_alone, *own], [*own, *rl_alone]):
        assert_equal(step(micro_batches, only("rl", (count, 1, 1)))[0], before)
    # The same rows, where padding was.
    shared = [laid([first, imitated[0]], [second, imitated[1]]), rl_alone[1]]
    assert_equal(step(shared, only("rl", (count, 1, 1)))[0], before)
    # Laid elsewhere by the packer: the same sum in another order.
    assert_close(step(packed([*imitated, *samples["rl"]]), only("rl", (count, 1, 1)))[0], before)


@pytest.mark.parametrize(("added", "is_exact"), [((3, 5), True), ((2, 1), False)])
async def test_an_added_ce_environment_changes_anothers_ce_term_by_the_ratio_of_their_counts(added, is_exact):
    old, new = await credited("ce", (3, 5), seed=4), await credited("ce", added, seed=5)
    before, both = counts_of(old), counts_of(old, new)
    assert (before[1], both[1]) == (8, 8 + sum(added))
    alone, alone_metrics, _ = step(packed(old), before)
    shared, shared_metrics, _ = step(packed(old), both)
    ratio = before[1] / both[1]
    # Half is a power of two, by which a float is divided without rounding.
    (assert_equal if is_exact else assert_close)(shared, scaled(alone, ratio))
    assert shared_metrics["loss/ce"] == pytest.approx(ratio * alone_metrics["loss/ce"], rel=0 if is_exact else 1e-6, abs=0)
    # And what both have together is each one's share: nothing is left over.
    whole, whole_metrics, _ = step(packed([*old, *new]), both)
    rest, rest_metrics, _ = step(packed(new), both)
    assert_close(whole, jax.tree.map(np.add, shared, rest))
    assert whole_metrics["loss/ce"] == pytest.approx(shared_metrics["loss/ce"] + rest_metrics["loss/ce"], rel=1e-6)


@pytest.mark.parametrize("component", COMPONENTS)
async def test_a_coefficient_scales_its_component_and_neither_a_count_nor_another_component(component):
    plain = await credited(component, (5, 4), seed=6)
    before, before_metrics, _ = step(packed(plain), counts_of(plain))
    for factor, is_exact in ((0.25, True), (2.0, True), (0.3, False)):
        weighed = await credited(component, (5, 4), seed=6, **{component: factor})
        np.testing.assert_array_equal(counts_of(weighed), counts_of(plain))
        after, metrics, _ = step(packed(weighed), counts_of(weighed))
        (assert_equal if is_exact else assert_close)(after, scaled(before, factor))
        assert metrics["loss/total"] == pytest.approx(factor * before_metrics["loss/total"], rel=0 if is_exact else 1e-6, abs=0)
    for other in COMPONENTS:
        if other != component:
            same = await credited(component, (5, 4), seed=6, **{other: 0.5})
            assert_equal(step(packed(same), counts_of(same))[0], before)


@pytest.mark.parametrize("component", COMPONENTS)
async def test_a_coefficient_of_zero_takes_the_tokens_out_of_their_component(component):
    silent = await credited(component, (5, 4), seed=6, **{component: 0.0})
    batch = make_batch(silent, CONFIG)
    assert batch.member_counts.sum() == batch.num_loss_tokens == 0
