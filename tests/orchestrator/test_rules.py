import pytest

from jaxrl.orchestrator.rules import is_eval_due, is_stale, lead_steps, may_dispatch, may_draw, should_ship


def test_a_synchronous_run_dispatches_only_for_the_step_that_its_policy_starts():
    assert lead_steps(step=4, version=3) == 0
    assert may_dispatch(step=4, version=3, async_level=0)
    assert not may_dispatch(step=5, version=3, async_level=0)


def test_level_one_dispatches_one_step_ahead_and_no_further():
    assert may_dispatch(step=5, version=3, async_level=1)
    assert not may_dispatch(step=6, version=3, async_level=1)


@pytest.mark.parametrize(
    ("kept", "in_flight", "num_in_flight", "expected"),
    [(0, 0, 0, True), (3, 0, 0, True), (3, 1, 1, False), (4, 0, 0, False), (0, 2, 2, False)],
)
def test_a_group_is_drawn_while_kept_and_in_flight_fall_short_and_there_is_room(
    kept, in_flight, num_in_flight, expected
):
    wanted = may_draw(kept=kept, in_flight=in_flight, needed=4, num_in_flight=num_in_flight, max_in_flight=2)
    assert wanted is expected


def test_staleness_counts_from_the_version_that_the_step_trains():
    assert not is_stale(step=10, oldest_version=1, max_staleness_steps=8)
    assert is_stale(step=10, oldest_version=5, max_staleness_steps=3)
    assert not is_stale(step=10, oldest_version=9, max_staleness_steps=0)


def test_a_frozen_source_never_goes_stale():
    assert not is_stale(step=1000, oldest_version=None, max_staleness_steps=0)


def test_a_synchronous_batch_waits_for_every_group_that_was_drawn():
    assert not should_ship(kept=5, needed=4, num_in_flight=1, lead=0, async_level=0)
    assert should_ship(kept=4, needed=4, num_in_flight=0, lead=0, async_level=0)


def test_an_asynchronous_batch_waits_for_the_trainer_and_not_for_stragglers():
    assert should_ship(kept=4, needed=4, num_in_flight=7, lead=1, async_level=1)
    assert not should_ship(kept=4, needed=4, num_in_flight=7, lead=2, async_level=1)
    assert not should_ship(kept=3, needed=4, num_in_flight=0, lead=0, async_level=1)


def test_every_nth_and_the_last_version_are_measured_once():
    due = [v for v in range(1, 11) if is_eval_due(v - 1, v, every_n_steps=4, last_version=10)]
    assert due == [4, 8, 10]
    assert [v for v in range(1, 11) if is_eval_due(v - 1, v, every_n_steps=None, last_version=10)] == [10]


def test_a_skipped_nth_version_is_measured_at_the_next_one():
    assert is_eval_due(3, 6, every_n_steps=4, last_version=10)
    assert not is_eval_due(4, 6, every_n_steps=4, last_version=10)
