"""How much an environment's components count: what `finalize_group` ships for each coefficient."""

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.config.algorithm import AlgorithmSamplingConfig, CoefficientsConfig, GRPOConfig, SFTConfig
from jaxrl.orchestrator.algo import GRPO, Algorithm, AlgorithmContext, build_algorithm
from jaxrl.orchestrator.algo.routing import fold_coefficients
from jaxrl.types import Boundary, component_members
from tests.builders import make_group, make_sample
from tests.fakes import ScriptedPool

WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")
SFT_CONFIG = SFTConfig(sampling=AlgorithmSamplingConfig(source="demonstrations"))


class Echoing(GRPO):
    """Policy gradient on the reply, and cross-entropy on a token of the question."""

    async def score_rollout(self, rollout):
        for sample in rollout.samples:
            sample.ce_weights = np.array([0.0, 0.5, 0.0, 0.0, 0.0], np.float32)


class Weighing(GRPO):
    """Policy gradient with weights of its own, one token left out."""

    async def score_rollout(self, rollout):
        for sample in rollout.samples:
            sample.rl_weights = np.array([9.0, 9.0, 2.0, 0.0, 0.5], np.float32)


class Distilling(Algorithm):
    """Divergence from a reference that finds every token equally likely."""

    action_loss_type: ClassVar = "ref_kl"

    async def score_rollout(self, rollout):
        for sample in rollout.samples:
            sample.ref_logprobs = np.full(5, -1.0, np.float32)


CREATORS = {
    "grpo": lambda context: build_algorithm(GRPOConfig(), ScriptedPool(), context),
    "sft": lambda context: build_algorithm(SFT_CONFIG, ScriptedPool(), context),
    "echoing": lambda context: Echoing(GRPOConfig(), ScriptedPool(), context),
    "weighing": lambda context: Weighing(GRPOConfig(), ScriptedPool(), context),
    "distilling": lambda context: Distilling(GRPOConfig(), ScriptedPool(), context),
}


async def stamped(name: str, **coefficients: float):
    """Return a rollout that an algorithm has finished with: two tokens of question, three of reply."""
    algorithm = CREATORS[name](AlgorithmContext("toy", coefficients=CoefficientsConfig(**coefficients)))
    source = {"logprob": None, "version": None} if name == "sft" else {}
    rollouts = make_group([1.0, 0.0], **source).survivors
    for rollout in rollouts:
        await algorithm.finalize_rollout(rollout)
    await algorithm.finalize_group(rollouts)
    return rollouts[0]


A = None
"""Absent: nothing is shipped."""
TABLE = [
    # algorithm, coefficients, rl weights, ce weights, ref_kl weights of the two question and three reply tokens
    pytest.param("grpo", {}, A, A, A, id="grpo: one stream, the advantages"),
    pytest.param("grpo", {"ce": 2.0, "ref_kl": 0.0}, A, A, A, id="grpo: what it does not feed"),
    pytest.param("grpo", {"rl": 0.25}, [0, 0, 0.25, 0.25, 0.25], A, A, id="grpo x 1/4"),
    pytest.param("grpo", {"rl": 0.0}, [0] * 5, A, A, id="grpo x 0"),
    pytest.param("weighing", {}, [9, 9, 2, 0, 0.5], A, A, id="own weights"),
    pytest.param("weighing", {"rl": 0.5}, [0, 0, 1, 0, 0.25], A, A, id="own weights x 1/2"),
    pytest.param("sft", {}, [0] * 5, [0, 0, 1, 1, 1], A, id="sft"),
    pytest.param("sft", {"ce": 0.5, "rl": 7.0}, [0] * 5, [0, 0, 0.5, 0.5, 0.5], A, id="sft x 1/2: rl stays dead"),
    pytest.param("sft", {"ce": 0.0}, [0] * 5, [0] * 5, A, id="sft x 0"),
    pytest.param("echoing", {}, A, [0, 0.5, 0, 0, 0], A, id="echoing"),
    pytest.param("echoing", {"ce": 0.5}, A, [0, 0.25, 0, 0, 0], A, id="echoing: ce x 1/2"),
    pytest.param("echoing", {"ce": 0.0}, A, [0] * 5, A, id="echoing: ce x 0"),
    pytest.param("echoing", {"rl": 2.0, "ce": 4.0}, [0, 0, 2, 2, 2], [0, 2, 0, 0, 0], A, id="echoing: both"),
    pytest.param("distilling", {}, [0] * 5, A, [0, 0, 1, 1, 1], id="distilling"),
    pytest.param("distilling", {"ref_kl": 3.0}, [0] * 5, A, [0, 0, 3, 3, 3], id="distilling x 3"),
    pytest.param("distilling", {"ref_kl": 0.0, "rl": 2.0}, [0] * 5, A, [0] * 5, id="distilling x 0"),
]


@pytest.mark.parametrize(("name", "coefficients", "rl", "ce", "ref_kl"), TABLE)
async def test_coefficients_are_folded_into_the_weights_of_the_tokens(name, coefficients, rl, ce, ref_kl):
    rollout = await stamped(name, **coefficients)
    assert rollout.failure is None
    (sample,) = rollout.samples
    for stream, expected in zip(WEIGHTS, (rl, ce, ref_kl), strict=True):
        weights = getattr(sample, stream)
        assert (None if weights is None else weights.tolist()) == expected, stream
        assert weights is None or (weights.dtype == np.float32 and not weights.flags.writeable)


@pytest.mark.parametrize("name", CREATORS)
@settings(max_examples=15, deadline=None)
@given(rl=st.floats(1e-3, 1e3), ce=st.floats(1e-3, 1e3), ref_kl=st.floats(1e-3, 1e3))
async def test_a_coefficient_other_than_0_changes_no_member_count(name, rl, ce, ref_kl):
    plain, scaled = await stamped(name), await stamped(name, rl=rl, ce=ce, ref_kl=ref_kl)
    counts = []
    for rollout in (plain, scaled):
        (sample,) = rollout.samples
        members = component_members(sample.loss_mask, *(getattr(sample, stream) for stream in WEIGHTS), np.ones(5, bool))
        counts.append([int(member.sum()) for member in members])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("coefficient", [1e300, 1e-300, 1e-40])
async def test_a_coefficient_that_float32_cannot_hold_fails_the_rollout_and_is_never_taken_for_0(coefficient):
    rollout = await stamped("grpo", rl=coefficient)
    assert rollout.failure.boundary is Boundary.ALGORITHM
    assert rollout.failure.message.startswith(f"env 'toy': `coefficients.rl`={coefficient:g} takes a weight in `rl_weights` out of")


def test_the_array_that_an_algorithm_wrote_is_not_written_into():
    written = np.array([0.0, 0.5, 0.0, 0.0, 0.0], np.float32)
    one, other = make_sample(ce_weights=written), make_sample(ce_weights=written)
    for sample in (one, other):
        fold_coefficients(sample, CoefficientsConfig(ce=2.0))
    assert written.tolist()[1] == 0.5 and one.ce_weights.tolist()[1] == other.ce_weights.tolist()[1] == 1.0
