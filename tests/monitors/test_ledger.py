import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.errors import RunFailedError
from jaxrl.monitors.ledger import Ledger
from jaxrl.types import Bucket, filtered
from tests.builders import make_rollout

DECIDED = [b for b in Bucket if b is not Bucket.PENDING] + [filtered("zero_advantage")]


def _rollouts(num: int) -> list:
    return [make_rollout(member=member, with_samples=False) for member in range(num)]


def test_a_dispatched_rollout_is_pending_until_it_is_decided():
    ledger = Ledger()
    ledger.dispatch(3)
    ledger.check(3)
    first, *_ = _rollouts(1)
    ledger.decide(first, Bucket.TRAINED)
    ledger.check(2)
    assert first.bucket == "trained"
    assert (ledger.dispatched, ledger.pending, ledger.count(Bucket.TRAINED)) == (3, 2, 1)


def test_a_rollout_cannot_be_decided_twice():
    ledger = Ledger()
    ledger.dispatch(2)
    first, *_ = _rollouts(1)
    ledger.decide(first, Bucket.ERRORED)
    with pytest.raises(RunFailedError, match=r"cannot become 'trained': it already is 'errored'"):
        ledger.decide(first, Bucket.TRAINED)
    assert (ledger.count(Bucket.ERRORED), ledger.count(Bucket.TRAINED), ledger.pending) == (1, 0, 1)


def test_a_rollout_that_was_never_dispatched_cannot_be_decided():
    with pytest.raises(RunFailedError, match="0 rollouts are pending"):
        Ledger().decide(_rollouts(1)[0], Bucket.TRAINED)


def test_pending_is_no_decision():
    ledger = Ledger()
    ledger.dispatch(1)
    with pytest.raises(RunFailedError, match="cannot become 'pending'"):
        ledger.decide(_rollouts(1)[0], Bucket.PENDING)


def test_a_pipeline_that_holds_fewer_rollouts_than_are_pending_has_lost_one():
    ledger = Ledger()
    ledger.dispatch(4)
    with pytest.raises(RunFailedError, match="holds 3; a rollout was lost"):
        ledger.check(3)


def test_counters_that_do_not_add_up_are_found():
    ledger = Ledger()
    ledger.dispatch(2)
    ledger.pending -= 1
    with pytest.raises(RunFailedError, match="counted twice"):
        ledger.check(1)


def test_truncation_is_an_attribute_beside_the_bucket():
    ledger = Ledger()
    ledger.dispatch(1)
    rollout = _rollouts(1)[0]
    rollout.is_truncated = True
    ledger.decide(rollout, Bucket.TRAINED)
    metrics = ledger.metrics()
    assert (metrics["ledger/trained"], metrics["ledger/truncated"]) == (1.0, 1.0)
    ledger.check(0)


def test_every_bucket_and_filter_has_a_column_from_the_start():
    metrics = Ledger(["zero_advantage"]).metrics()
    buckets = {str(b) for b in Bucket} | {"filtered/zero_advantage", "dispatched", "truncated"}
    assert set(metrics) == {f"ledger/{name}" for name in buckets}
    assert set(metrics.values()) == {0.0}


def test_after_a_restart_what_was_pending_is_not_dispatched_yet():
    ledger = Ledger()
    ledger.dispatch(5)
    for rollout in _rollouts(2):
        ledger.decide(rollout, Bucket.TRAINED)
    restored = Ledger()
    restored.load_state_dict(ledger.state_dict())
    restored.check(0)
    assert (restored.dispatched, restored.pending, restored.count(Bucket.TRAINED)) == (2, 0, 2)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(DECIDED), max_size=20), st.integers(0, 5))
def test_the_buckets_always_add_up_to_what_was_dispatched(buckets, num_extra):
    ledger = Ledger()
    ledger.dispatch(len(buckets) + num_extra)
    for rollout, bucket in zip(_rollouts(len(buckets)), buckets, strict=True):
        ledger.decide(rollout, bucket)
        ledger.check(ledger.pending)
    values = {k: v for k, v in ledger.metrics().items() if k not in ("ledger/dispatched", "ledger/truncated")}
    assert sum(values.values()) == ledger.dispatched
    assert values["ledger/pending"] == num_extra
