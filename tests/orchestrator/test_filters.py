import numpy as np
import pytest

from jaxrl.config.orchestrator import ZeroAdvantageFilterConfig
from jaxrl.orchestrator.filters import apply_filters, is_zero_advantage
from tests.builders import make_rollout

ENFORCED = [ZeroAdvantageFilterConfig()]


def _rollout(advantage: float | None, **streams):
    rollout = make_rollout()
    if advantage is not None:
        rollout.assign_advantages(advantage)
    for name, value in streams.items():
        setattr(rollout.samples[0], name, np.full(len(rollout.samples[0]), value, np.float32))
    return rollout


def test_assigned_zeros_match_and_never_assigned_does_not():
    assert is_zero_advantage(_rollout(0.0))
    assert not is_zero_advantage(_rollout(None))
    assert not is_zero_advantage(_rollout(0.25))


@pytest.mark.parametrize("stream", ["ce_weights", "ref_kl_weights"])
def test_a_rollout_that_another_component_trains_on_is_never_dropped(stream):
    assert not is_zero_advantage(_rollout(0.0, **{stream: 0.1}))
    assert is_zero_advantage(_rollout(0.0, **{stream: 0.0}))


def test_one_branch_with_credit_keeps_the_whole_rollout():
    rollout = make_rollout()
    rollout.samples = [make_rollout().samples[0], make_rollout().samples[0]]
    rollout.assign_advantages(0.0)
    rollout.samples[1].advantages[-1] = 0.5
    assert not is_zero_advantage(rollout)


def test_every_rollout_is_kept_or_dropped_once_and_in_order():
    rollouts = [_rollout(a) for a in (0.0, 1.0, 0.0, -1.0)]
    result = apply_filters(rollouts, ENFORCED)
    assert [r.mean_advantage() for r in result.kept] == [1.0, -1.0]
    assert [name for _, name in result.dropped] == ["zero_advantage"] * 2
    assert result.matched == {"zero_advantage": 2}


def test_a_filter_that_is_not_enforced_only_counts():
    result = apply_filters([_rollout(0.0)], [ZeroAdvantageFilterConfig(enforce=False)])
    assert (len(result.kept), result.dropped, result.matched) == (1, [], {"zero_advantage": 1})
