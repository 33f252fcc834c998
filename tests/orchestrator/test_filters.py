"""Each filter on hand-made rollouts: what it matches, at its very threshold and on either side, and what a list of them does."""

import math
from typing import get_args

import numpy as np
import pytest

from jaxrl.config.filters import (
    FilterConfig,
    GibberishFilterConfig,
    MinRewardFilterConfig,
    NonFiniteFilterConfig,
    OverlongFilterConfig,
    RepetitionFilterConfig,
    ZeroAdvantageFilterConfig,
)
from jaxrl.config.model import PolicyModelConfig
from jaxrl.config.orchestrator import OrchestratorConfig
from jaxrl.orchestrator.filters import PREDICATES, apply_filters, build_filters, is_zero_advantage
from jaxrl.types import Rollout
from tests.builders import make_node, make_rollout

VOCAB_SIZE = 200_000
RARE, SURE, UNSURE = 100_001, -0.001, -3.0
"""An id above the default threshold; logprobs on either side of ln 0.99 = -0.01005."""


def rollout_of(*nodes) -> Rollout:
    """Return a scored rollout of these nodes, without samples."""
    rollout = make_rollout(turns=(), with_samples=False)
    rollout.nodes = list(nodes)
    return rollout


def replied(parent, logprobs, ids=None, version=0):
    """Return a reply whose generation prompt is one token and whose sampled tokens have these logprobs."""
    ids = [7] * len(logprobs) if ids is None else ids
    node = make_node(parent, [1, *ids], num_sampled=len(ids), version=version)
    node.logprobs = None if version is None else np.asarray(logprobs, np.float32)
    return node


def turns_of(*turns, version=0) -> Rollout:
    """Return a rollout of one branch: a question before each reply."""
    nodes = []
    for logprobs in turns:
        nodes.append(make_node(len(nodes) - 1 if nodes else None, [2, 3, 4]))
        nodes.append(replied(len(nodes) - 1, logprobs, version=version))
    return rollout_of(*nodes)


def matches(config, rollout) -> bool:
    (own,) = build_filters([config], {"toy": VOCAB_SIZE})
    return own.matches(rollout)


CEILING = np.float32(-math.log(VOCAB_SIZE) - 2.0)


@pytest.mark.parametrize(
    ("token", "logprob", "is_match"),
    [
        (RARE, -14.3, True),
        (RARE, -14.1, False),  # -ln(200,000) - 2 = -14.206
        (RARE, CEILING, False),
        (RARE, np.nextafter(CEILING, np.float32(-np.inf)), True),
        (100_000, -50.0, False),
        (5, -50.0, False),
    ],
)
def test_gibberish_is_a_rare_token_below_the_logprob_of_a_random_one(token, logprob, is_match):
    rollout = rollout_of(make_node(None, [2, RARE]), replied(0, [-0.1, logprob, -0.1], [5, token, 6]))
    assert matches(GibberishFilterConfig(), rollout) is is_match


def test_gibberish_is_looked_for_in_every_turn_and_branch_and_its_settings_count():
    late = rollout_of(make_node(None, [2]), replied(0, [-0.1], [5]), make_node(0, [3]), replied(2, [-15.0], [RARE]))
    assert matches(GibberishFilterConfig(), late)
    assert not matches(GibberishFilterConfig(token_id_threshold=RARE), late)
    assert not matches(GibberishFilterConfig(logprob_offset=3.0), late)
    assert matches(GibberishFilterConfig(token_id_threshold=-1, logprob_offset=-20.0), turns_of([-0.1]))


@pytest.mark.parametrize(
    ("turns", "is_match"),
    [
        ([[SURE] * 4], True),
        ([[SURE] * 3], False),
        ([[SURE] * 3 + [UNSURE] + [SURE] * 3], False),
        ([[UNSURE] + [SURE] * 4 + [UNSURE]], True),
        ([[SURE] * 2, [SURE] * 2], True),  # the question between two replies is passed over
        ([[SURE] * 2, [UNSURE, SURE, SURE, SURE]], False),
        ([[SURE] * 3 + [math.log(0.99)]], False),  # exactly the threshold is not above it
        ([[0.0] * 4], True),
        ([[UNSURE]], False),
    ],
)
def test_repetition_is_a_window_of_sure_tokens(turns, is_match):
    assert matches(RepetitionFilterConfig(window=4), turns_of(*turns)) is is_match


def test_a_streak_ends_with_its_branch():
    """Two replies to one question: two sure tokens before the fork, and two or one on each side of it."""
    question, opening = make_node(None, [2, 3]), replied(0, [UNSURE, SURE, SURE])
    sides = [replied(1, [SURE, SURE, UNSURE]), replied(1, [SURE])]
    rollout = rollout_of(question, opening, *sides)
    assert matches(RepetitionFilterConfig(window=4), rollout)
    assert not matches(RepetitionFilterConfig(window=5), rollout), "no branch has more than four in a row"
    roots = rollout_of(make_node(None, [2]), replied(0, [SURE] * 3), make_node(None, [2]), replied(2, [SURE] * 3))
    assert not matches(RepetitionFilterConfig(window=4), roots)


def test_the_default_window_is_3000_tokens():
    assert matches(RepetitionFilterConfig(), turns_of([SURE] * 1500, [SURE] * 1500))
    assert not matches(RepetitionFilterConfig(), turns_of([SURE] * 1500, [SURE] * 1499))


@pytest.mark.parametrize("config", [GibberishFilterConfig(token_id_threshold=-1), RepetitionFilterConfig(window=1)])
def test_tokens_that_the_policy_did_not_sample_have_no_logprob_that_could_match(config):
    frozen = turns_of([0.0] * 5, version=None)
    frozen.samples = make_rollout(version=None, logprob=None).samples
    assert not frozen.samples[0].inference_logprobs.any(), "the stream holds zeros, as if every token were sure"
    assert not matches(config, frozen)
    assert not matches(config, rollout_of(make_node(None, [2, 3])))
    frozen.nodes[1].logprobs = np.full(5, -50.0, np.float32)  # a source's own logprobs are not the policy's
    assert not matches(config, frozen)


def _credited(advantage: float | None, **streams):
    rollout = make_rollout()
    if advantage is not None:
        rollout.assign_advantages(advantage)
    for name, value in streams.items():
        setattr(rollout.samples[0], name, np.full(len(rollout.samples[0]), value, np.float32))
    return rollout


def test_assigned_zeros_match_and_never_assigned_does_not():
    assert is_zero_advantage(_credited(0.0))
    assert not is_zero_advantage(_credited(None))
    assert not is_zero_advantage(_credited(0.25))


@pytest.mark.parametrize("stream", ["ce_weights", "ref_kl_weights"])
def test_a_rollout_that_another_component_trains_on_is_never_dropped_for_its_advantages(stream):
    assert not is_zero_advantage(_credited(0.0, **{stream: 0.1}))
    assert is_zero_advantage(_credited(0.0, **{stream: 0.0}))


def test_one_branch_with_credit_keeps_the_whole_rollout():
    rollout = make_rollout()
    rollout.samples = [make_rollout().samples[0], make_rollout().samples[0]]
    rollout.assign_advantages(0.0)
    rollout.samples[1].advantages[-1] = 0.5
    assert not is_zero_advantage(rollout)


def test_a_filter_of_quality_drops_what_another_component_trains_on():
    rollout = _credited(None, ce_weights=1.0)
    rollout.reward = 0.0
    assert matches(MinRewardFilterConfig(threshold=1.0), rollout)


@pytest.mark.parametrize(
    ("is_truncated", "limit", "is_match"),
    [(True, None, True), (False, None, False), (False, 3, False), (False, 2, True), (True, 3, True)],
)
def test_overlong_is_what_was_cut_or_has_more_tokens_than_wanted(is_truncated, limit, is_match):
    rollout = make_rollout(turns=(((1, 2, 3, 4), (5, 6)), ((7,), (8,))))  # three sampled tokens
    rollout.is_truncated = is_truncated
    assert matches(OverlongFilterConfig(max_completion_tokens=limit), rollout) is is_match


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["reward", "metrics", "inference_logprobs", "temperatures", "advantages", "ref_logprobs"])
def test_one_number_that_is_not_finite_matches_wherever_it_is(where, bad):
    rollout = _credited(1.0, ref_logprobs=-1.0)
    rollout.metrics["turns"] = 1.0
    assert not matches(NonFiniteFilterConfig(), rollout)
    if where == "reward":
        rollout.reward = bad
    elif where == "metrics":
        rollout.metrics["loss"] = bad
    else:
        getattr(rollout.samples[-1], where)[0] = bad
    assert matches(NonFiniteFilterConfig(), rollout)


@pytest.mark.parametrize(("reward", "is_match"), [(0.49, True), (0.5, False), (1.0, False), (None, False)])
def test_a_reward_below_the_threshold_matches_and_one_that_equals_it_does_not(reward, is_match):
    assert matches(MinRewardFilterConfig(threshold=0.5), make_rollout(reward)) is is_match


def test_every_rollout_is_kept_or_dropped_once_and_in_order():
    rollouts = [_credited(a) for a in (0.0, 1.0, 0.0, -1.0)]
    result = apply_filters(rollouts, build_filters([ZeroAdvantageFilterConfig()], {"toy": VOCAB_SIZE}))
    assert [r.mean_advantage() for r in result.kept] == [1.0, -1.0]
    assert [name for _, name in result.dropped] == ["zero_advantage"] * 2
    assert result.matched == {"zero_advantage": 2}


def test_every_filter_counts_its_own_matches_and_the_first_enforced_one_drops():
    rollout = _credited(0.0)  # of reward 1
    quiet, rewards, zeros = (
        OverlongFilterConfig(),
        MinRewardFilterConfig(threshold=2.0),
        ZeroAdvantageFilterConfig(),
    )
    cases = [
        ([quiet, rewards, zeros], "min_reward"),
        ([zeros, rewards, quiet], "zero_advantage"),
        ([rewards.model_copy(update={"enforce": False}), zeros, quiet], "zero_advantage"),
        ([rewards.model_copy(update={"enforce": False}), zeros.model_copy(update={"enforce": False}), quiet], None),
    ]
    for configs, expected in cases:
        result = apply_filters([rollout], build_filters(configs, {"toy": VOCAB_SIZE}))
        assert [name for _, name in result.dropped] == [expected] * (expected is not None)
        assert len(result.kept) == (expected is None)
        assert result.matched == {"overlong": 0, "min_reward": 1, "zero_advantage": 1}


def test_every_filter_that_can_be_configured_has_a_predicate_and_the_defaults_drop_only_zero_advantage():
    classes = get_args(get_args(FilterConfig)[0])
    assert [cls.model_fields["type"].default for cls in classes] == list(PREDICATES)
    config = OrchestratorConfig(model=PolicyModelConfig(name="m"), train={"env": [{"type": "reverse_text"}]})
    assert config.pre_batch_filters == []
    assert [(own.type, own.enforce) for own in config.post_batch_filters] == [
        ("gibberish", False),
        ("repetition", False),
        ("zero_advantage", True),
    ]
    others = (OverlongFilterConfig(), NonFiniteFilterConfig(), MinRewardFilterConfig(threshold=0.0))
    assert all(own.enforce for own in others)


@pytest.mark.parametrize("slot", ["pre_batch_filters", "post_batch_filters"])
def test_a_filter_type_twice_in_a_slot_is_an_error_that_names_the_slot(slot):
    twice = [{"type": "overlong"}, {"type": "overlong", "enforce": False}]
    with pytest.raises(ValueError, match=f"`orchestrator.{slot}` lists the same filter type twice"):
        OrchestratorConfig(model=PolicyModelConfig(name="m"), train={"env": [{"type": "reverse_text"}]}, **{slot: twice})
