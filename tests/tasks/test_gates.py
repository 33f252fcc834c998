"""Gates: which groups they let in, that all of them are asked, and every way to get a gate of one's own wrong."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jaxrl.config.tasks import AdvantageRangeGateConfig, PythonGateConfig, RewardRangeGateConfig
from jaxrl.errors import ConfigError
from jaxrl.tasks.gates import AdvantageRangeGate, RewardRangeGate, build_gates
from jaxrl.types import Boundary, Failure, Rollout
from tests.builders import make_rollout

HERE = __name__


def credited(*advantages: float | list[float] | None, rewards: Sequence[float | None] | None = None) -> list[Rollout]:
    """Return a group with these advantages on the three sampled tokens of each rollout; None leaves them unassigned."""
    group = [make_rollout(reward, member=member) for member, reward in enumerate(rewards or [1.0] * len(advantages))]
    for rollout, values in zip(group, advantages, strict=True):
        if values is not None:
            rollout.assign_advantages([0.0, 0.0, *values] if isinstance(values, list) else values)
    return group


def stream(rollout: Rollout, value: float) -> np.ndarray:
    (sample,) = rollout.samples
    return np.full(len(sample), value, np.float32)


@pytest.mark.parametrize(
    ("advantages", "admitted"),
    [
        ([0.0, 0.0], False),
        ([0.0, 0.5], True),
        ([0.0, [0.0, 0.0, -1e-30]], True),
        ([None, None], True),
        ([0.0, None], True),
    ],
)
def test_a_group_whose_advantages_are_all_zero_is_turned_away_and_one_without_advantages_is_not(advantages: list, admitted: bool) -> None:
    assert AdvantageRangeGate().admits(credited(*advantages)) is admitted


@pytest.mark.parametrize(
    ("low", "high", "admitted"),
    [(-0.1, 0.1, False), (-0.1, 0.09, True), (-0.09, 0.1, True), (0.0, 0.1, True), (-1.0, 1.0, False)],
)
def test_the_ends_of_the_range_belong_to_it(low: float, high: float, admitted: bool) -> None:
    assert AdvantageRangeGate(low, high).admits(credited([0.1, 0.0, 0.1], [-0.1, 0.1, 0.0])) is admitted


def test_a_range_without_zero_judges_the_trained_tokens_alone() -> None:
    assert not AdvantageRangeGate(0.1, 0.5).admits(credited(0.25, 0.25)), "the advantages of the prompt are 0"
    assert AdvantageRangeGate(0.1, 0.5).admits(credited(0.25, 0.0))


@pytest.mark.parametrize("name", ["ce_weights", "ref_kl_weights"])
@pytest.mark.parametrize("value", [0.5, -0.5])
def test_a_group_that_another_loss_component_trains_on_is_let_in(name: str, value: float) -> None:
    group = credited(0.0, 0.0)
    setattr(group[1].samples[0], name, stream(group[1], 0.0))
    assert not AdvantageRangeGate().admits(group)
    getattr(group[1].samples[0], name)[1] = value  # off the loss mask, where these components have members too
    assert AdvantageRangeGate().admits(group)


def test_tokens_that_are_not_trained_by_the_rl_loss_are_not_judged() -> None:
    group = credited(0.0, 1.0)
    group[1].samples[0].rl_weights = stream(group[1], 0.0)
    assert not AdvantageRangeGate().admits(group)
    group[1].samples[0].advantages = None
    assert not AdvantageRangeGate().admits(group), "none of its tokens needs an advantage"
    group[0].samples[0].loss_mask = np.zeros(5, bool)
    assert AdvantageRangeGate().admits(group), "there is nothing left to judge"


@pytest.mark.parametrize(
    ("rewards", "admitted"),
    [
        ([1.0, 0.0], True),
        ([1.0, 1.0], False),
        ([0.2, 0.2], True),
        ([0.8, 0.8], True),
        ([0.0, 0.3], False),
        ([None, 0.5], True),
        ([None], True),
    ],
)
def test_a_group_is_let_in_if_the_mean_of_its_rewards_is_in_the_range(rewards: list, admitted: bool) -> None:
    gate = RewardRangeGate(0.2, 0.8)
    assert gate.admits([make_rollout(reward) for reward in rewards]) is admitted
    failed = make_rollout(99.0, failure=Failure(Boundary.GRADER, "LookupError", "broken"))
    assert gate.admits([*(make_rollout(reward) for reward in rewards), failed]) is admitted


def is_long(rollouts: list[Rollout], *, least: int = 1, **more: Any) -> bool:
    return sum(rollout.num_completion_tokens for rollout in rollouts) >= least


def is_long_by_numpy(rollouts: list[Rollout]) -> Any:
    return np.all([rollout.num_completion_tokens >= 1 for rollout in rollouts])


def count(rollouts: list[Rollout]) -> Any:
    return len(rollouts)


def nothing(rollouts: list[Rollout]) -> None:
    return None


def later(rollouts: list[Rollout]) -> Any:
    return waiting(rollouts)


async def waiting(rollouts: list[Rollout]) -> bool:
    return True


def raising(rollouts: list[Rollout]) -> bool:
    raise LookupError("no such key")


NO_FUNCTION = 3


def own(name: str, **kwargs: Any) -> PythonGateConfig:
    return PythonGateConfig(name="mine", import_path=f"{HERE}:{name}", kwargs=kwargs)


def test_configs_become_gates_in_their_order() -> None:
    gates = build_gates([own("is_long", least=4), AdvantageRangeGateConfig(low=-0.5), RewardRangeGateConfig(low=0.1, high=0.9)])
    assert [gate.name for gate in gates] == ["mine", "advantage_range", "reward_range"]
    assert gates[1:] == (AdvantageRangeGate(-0.5, 0.0), RewardRangeGate(0.1, 0.9))
    assert [gate.admits(credited(-0.4, rewards=[1.0])) for gate in gates] == [False, False, False]
    assert [gate.admits(credited(-0.4, 0.1, rewards=[1.0, 0.0])) for gate in gates] == [True, True, True]
    assert build_gates([]) == ()
    (numpy_gate,) = build_gates([own("is_long_by_numpy")])
    assert numpy_gate.admits(credited(0.0)) is True


@pytest.mark.parametrize(
    ("name", "answer"), [("count", "returned 1, a int"), ("nothing", "returned None, a NoneType"), ("later", "a coroutine")]
)
def test_a_gate_that_does_not_say_true_or_false_is_an_error_in_words(name: str, answer: str) -> None:
    (gate,) = build_gates([own(name)])
    with pytest.raises(TypeError, match=f"`{HERE}:{name}`.*{answer}.*True or False"):
        gate.admits(credited(0.0))


def test_what_a_gate_raises_is_left_as_it_is() -> None:
    (gate,) = build_gates([own("raising")])
    with pytest.raises(LookupError, match="no such key"):
        gate.admits(credited(0.0))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (own("absent"), "cannot be imported"),
        (own("NO_FUNCTION"), "is a int; name a class or a function"),
        (own("waiting"), "is a coroutine function"),
        (own("count", least=1), r"cannot be called with \(rollouts, least=\.\.\.\): .*unexpected keyword"),
        (own("is_long", rollouts=[]), "multiple values"),
    ],
)
def test_a_gate_that_cannot_be_asked_is_refused_before_the_run(config: PythonGateConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=f"gate 'mine': `import_path`='{HERE}:.*{message}"):
        build_gates([config])


def test_a_gate_leaves_the_rollouts_as_they_are() -> None:
    group = credited(0.25, -0.25)
    before = [sample.advantages.copy() for rollout in group for sample in rollout.samples if sample.advantages is not None]
    for gate in build_gates([AdvantageRangeGateConfig(), RewardRangeGateConfig(low=0, high=math.pi)]):
        gate.admits(group)
    after = [sample.advantages for rollout in group for sample in rollout.samples]
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
