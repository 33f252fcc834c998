import pytest

from jaxrl.orchestrator.batcher import Batcher
from jaxrl.orchestrator.draws import Draw
from jaxrl.orchestrator.groups import KeptGroup, OpenGroup
from tests.builders import make_group


def _kept(index: int = 0, *, size: int = 2, num_tokens: int = 5, version: int | None = 0) -> KeptGroup:
    turns = (((1, 2), tuple(range(3, 1 + num_tokens))),)
    group = make_group([1.0] * size, draw_index=index, version=version, turns=turns)
    source = OpenGroup(index, Draw("toy", {}, index), None, group, group.rollouts, opened_at_s=0.0)
    return KeptGroup(source, group.rollouts)


def _orders(groups: list[KeptGroup]) -> list[int]:
    return [group.source.order for group in groups]


def test_a_step_takes_whole_groups_oldest_first():
    batcher = Batcher(groups=2)
    for index in range(3):
        batcher.add(_kept(index))
    assert (batcher.kept, batcher.needed) == (3, 2)
    assert _orders(batcher.take(everything=False)) == [0, 1]
    assert _orders(batcher.waiting) == [2]


def test_a_partial_group_counts_as_one():
    batcher = Batcher(groups=2)
    batcher.add(_kept(0, size=1))
    assert batcher.kept == 1


def test_tokens_are_taken_until_the_target_is_reached():
    batcher = Batcher(tokens=25, tokens_per_group=10)
    for index in range(4):
        batcher.add(_kept(index, size=2, num_tokens=5))
    assert batcher.kept == 40
    assert _orders(batcher.take(everything=False)) == [0, 1, 2]


def test_a_synchronous_step_leaves_nothing_over():
    batcher = Batcher(tokens=10, tokens_per_group=10)
    for index in range(3):
        batcher.add(_kept(index))
    assert _orders(batcher.take(everything=True)) == [0, 1, 2]
    assert batcher.kept == 0


def test_a_group_goes_stale_by_its_oldest_token():
    batcher = Batcher(groups=4)
    for index, version in enumerate([3, 0, None, 2]):
        batcher.add(_kept(index, version=version))
    assert _orders(batcher.pop_stale(step=4, max_staleness_steps=1)) == [1]
    assert _orders(batcher.waiting) == [0, 2, 3]


def test_the_estimate_of_a_groups_tokens_starts_at_the_first_group_and_follows():
    batcher = Batcher(tokens=100, tokens_per_group=50)
    assert (batcher.expected_size(2), batcher.groups_per_step) == (100, 2)
    batcher.add(_kept(0, num_tokens=5))
    assert (batcher.expected_size(2), batcher.groups_per_step) == (20, 10)
    batcher.add(_kept(1, num_tokens=10))
    assert batcher.expected_size(1) == pytest.approx(11.0)
    restored = Batcher(tokens=100, tokens_per_group=50)
    restored.load_state_dict(batcher.state_dict())
    assert restored.expected_size(3) == batcher.expected_size(3)


def test_a_group_without_a_rollout_must_not_take_a_place():
    empty = _kept()
    empty.rollouts = []
    with pytest.raises(AssertionError, match="must not take a place"):
        Batcher(groups=1).add(empty)
