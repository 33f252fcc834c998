import asyncio
import time

import numpy as np
import pytest

from jaxrl.orchestrator.metrics import LoopLag, StepTally, StepTimer, member_metrics, staleness_metrics, time_metrics
from jaxrl.types import Boundary, Bucket, Failure, PackedSample, Task
from tests.builders import make_group, make_rollout
from tests.fakes import FakeClock


def _decided(reward, bucket, *, order=0, env_name="toy", member=0, num_tokens=3, **attributes):
    turns = (((1, 2), tuple(range(3, 3 + num_tokens))),)
    rollout = make_rollout(reward, env_name=env_name, member=member, turns=turns)
    rollout.bucket = bucket
    for name, value in attributes.items():
        setattr(rollout, name, value)
    return order, rollout


def _tally(*entries) -> StepTally:
    tally = StepTally()
    for order, rollout in entries:
        tally.add_rollout(order, rollout)
    return tally


def test_reward_means_are_over_every_scored_rollout_and_errors_are_counted_apart():
    failure = Failure(Boundary.ENV, "ValueError", "broke")
    tally = _tally(
        _decided(1.0, Bucket.TRAINED, num_tokens=2),
        _decided(0.0, "filtered/zero_advantage", num_tokens=6),
        _decided(0.5, Bucket.TRAINED, env_name="other", num_tokens=1, is_truncated=True),
        _decided(None, Bucket.ERRORED, failure=failure),
        _decided(None, Bucket.CANCELLED),
    )
    metrics = tally.metrics()
    assert metrics["rollout/reward/mean"] == 0.5
    assert metrics["rollout/reward/mean/toy"] == 0.5
    assert metrics["rollout/reward/mean/other"] == 0.5
    assert metrics["rollout/reward/trained_mean"] == 0.75
    assert metrics["rollout/completion_tokens/mean"] == 3.0
    assert metrics["rollout/completion_tokens/mean/toy"] == 4.0
    assert metrics["rollout/completion_tokens/mean/other"] == 1.0
    assert metrics["rollout/error_frac"] == 0.25
    assert metrics["rollout/truncated_frac"] == 0.25


def test_turns_are_averaged_over_the_rollouts_that_did_not_fail_and_per_environment():
    failure = Failure(Boundary.ENV, "ValueError", "broke")
    entries = [
        _decided(1.0, Bucket.TRAINED),
        _decided(0.0, "filtered/zero_advantage"),
        _decided(0.5, Bucket.TRAINED, env_name="other"),
        _decided(None, Bucket.ERRORED, failure=failure),
    ]
    for (_, rollout), num_turns in zip(entries, (1, 2, 6, 9), strict=True):
        (reply,) = [node for node in rollout.nodes if node.sampled]
        rollout.nodes.extend([reply] * (num_turns - 1))
    metrics = _tally(*entries).metrics()
    assert metrics["rollout/num_turns/mean"] == 3.0
    assert metrics["rollout/num_turns/mean/toy"] == 1.5
    assert metrics["rollout/num_turns/mean/other"] == 6.0


def test_what_rollouts_report_is_averaged_per_environment_over_those_that_report_it():
    failure = Failure(Boundary.ENV, "ValueError", "broke")
    metrics = _tally(
        _decided(1.0, Bucket.TRAINED, metrics={"tools/calls": 2.0, "forks": 0.0}),
        _decided(0.0, "filtered/zero_advantage", metrics={"tools/calls": 1.0}),
        _decided(None, Bucket.ERRORED, failure=failure, metrics={"tools/calls": 9.0}),
        _decided(0.5, Bucket.TRAINED, env_name="other", metrics={"tools/calls": 5.0}),
    ).metrics()
    reported = {name: value for name, value in metrics.items() if name.startswith("env/")}
    assert reported == {"env/toy/tools/calls": 1.5, "env/toy/forks": 0.0, "env/other/tools/calls": 5.0}


def test_what_is_undefined_is_left_out():
    assert _tally(_decided(None, Bucket.CANCELLED)).metrics() == {}
    assert staleness_metrics(3, [make_rollout(version=None, logprob=None)]) == {}


def test_rollouts_come_in_draw_order_and_then_by_member():
    tally = _tally(*(_decided(1.0, Bucket.TRAINED, order=o, member=m) for o, m in [(2, 1), (0, 1), (2, 0), (0, 0)]))
    assert [r.member for r in tally.rollouts()] == [0, 1, 0, 1]
    tally.clear()
    assert tally.rollouts() == []


def test_advantages_are_summed_up_per_rollout():
    tally = StepTally()
    for member, advantage in enumerate([0.5, -0.5, 0.0, None]):
        _, rollout = _decided(1.0, Bucket.TRAINED, member=member)
        if advantage is not None:
            rollout.assign_advantages(advantage)
        tally.add_rollout(0, rollout)
    metrics = tally.metrics()
    names = ("advantage/mean", "advantage/min", "advantage/max", "advantage/zero_frac")
    assert [metrics[name] for name in names] == pytest.approx([0.0, -0.5, 0.5, 1 / 3])


def test_a_group_has_no_signal_when_every_assigned_advantage_is_zero():
    tally = StepTally()
    for advantages in ([0.0, 0.0], [0.5, -0.5], [None, None]):
        group = make_group([1.0, 1.0])
        for rollout, advantage in zip(group, advantages, strict=True):
            if advantage is not None:
                rollout.assign_advantages(advantage)
        tally.add_group(group.rollouts)
    assert tally.metrics()["group/zero_signal_frac"] == 0.5


def _routed(advantage, **weights):
    """Return a group of two rollouts with these advantages and weights on their sampled tokens."""
    group = make_group([1.0, 1.0])
    for rollout in group:
        if advantage is not None:
            rollout.assign_advantages(advantage)
        for name, weight in weights.items():
            setattr(rollout.samples[0], name, np.where(rollout.samples[0].loss_mask, np.float32(weight), np.float32(0)))
    return group.rollouts


def test_a_group_whose_rollouts_were_all_masked_is_not_one_with_equal_rewards():
    masked = _routed(None)
    for rollout in masked:
        rollout.samples[0].loss_mask[:] = False
        rollout.assign_advantages(0.5)
    tally = StepTally()
    tally.add_group(masked)
    assert "group/zero_signal_frac" not in tally.metrics()


def test_groups_that_other_components_train_are_not_groups_without_signal():
    distilled = _routed(None, rl_weights=0.0, ref_kl_weights=1.0)
    imitated = _routed(0.0, rl_weights=0.0, ce_weights=1.0)
    tally = StepTally()
    tally.add_group(distilled)
    tally.add_group(imitated)
    assert "group/zero_signal_frac" not in tally.metrics(), "no group's credit feeds the rl loss"
    tally.add_group(_routed(0.0))
    assert tally.metrics()["group/zero_signal_frac"] == 1.0
    tally.add_group(_routed(0.0, ce_weights=0.1))  # equal rewards, but there is something to imitate
    assert tally.metrics()["group/zero_signal_frac"] == 0.5


def test_member_tokens_are_counted_by_component_and_environment_as_the_packer_took_them():
    (imitated, _), (plain, longer) = _routed(0.0, rl_weights=0.0, ce_weights=1.0), _routed(0.5, ref_kl_weights=2.0)
    plain.task, imitated.packed = Task("other", "task-0", {}), [PackedSample(0, 5)]
    plain.packed, longer.packed = [PackedSample(1, 4)], [None]  # one was cut to four tokens, one did not fit
    assert member_metrics([imitated, plain, longer]) == {
        "tokens/ce/toy": 3.0,
        "tokens/rl/other": 2.0,
        "tokens/ref_kl/other": 2.0,
    }


def test_a_group_is_partial_when_some_but_not_all_of_its_rollouts_are_scored():
    tally = StepTally()
    for rewards in ([1.0, 1.0], [1.0, None], [None, None]):
        tally.add_group(make_group(rewards).rollouts)
    assert tally.metrics()["group/partial_frac"] == 0.5


def test_a_filters_share_is_of_the_rollouts_that_it_saw():
    tally = StepTally()
    tally.add_matches({"zero_advantage": 1, "overlong": 0}, 4)
    tally.add_matches({"zero_advantage": 0}, 4)
    assert tally.metrics() == {"filters/zero_advantage/frac": 0.125, "filters/overlong/frac": 0.0}


def test_staleness_is_mean_and_max_over_the_trained_rollouts():
    rollouts = [make_rollout(version=v) for v in (4, 3, 4)]
    assert staleness_metrics(5, rollouts) == {"policy/staleness_steps/mean": 1 / 3, "policy/staleness_steps/max": 1.0}


def test_the_timer_tells_generation_from_waiting_for_a_version():
    clock = FakeClock()
    timer = StepTimer(clock)
    timer.set_gate(is_open=False)
    clock.advance(3.0)
    timer.set_gate(is_open=False)
    clock.advance(1.0)
    timer.set_gate(is_open=True)
    clock.advance(5.0)
    assert timer.lap() == (5.0, 4.0)
    timer.restart()
    clock.advance(2.0)
    timer.set_gate(is_open=False)
    clock.advance(1.0)
    assert timer.lap() == (2.0, 1.0)


def test_the_speed_of_generation_counts_every_decided_rollout_of_the_policy():
    rollouts = [_decided(1.0, Bucket.TRAINED, num_tokens=6)[1], _decided(None, Bucket.STALE, num_tokens=4)[1]]
    rollouts.append(make_rollout(version=None, logprob=None))  # a demonstration: the policy wrote nothing of it
    metrics = time_metrics(rollouts, generate_s=2.0, wait_s=1.0, pack_s=0.5)
    assert metrics["throughput/generated_tokens_per_s"] == 5.0
    assert "throughput/generated_tokens_per_s" not in time_metrics(rollouts, generate_s=0.0, wait_s=0.0, pack_s=0.0)


async def test_a_blocked_event_loop_shows_as_lag():
    lag = LoopLag()
    assert lag.metrics() == {}
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0)
    time.sleep(0.3)
    await asyncio.sleep(0.01)
    task.cancel()
    assert 0.15 < lag.metrics()["loop/lag_s/p99"] < 5.0
