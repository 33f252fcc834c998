"""Which groups are let into a batch: predicates on the scored rollouts of one group.

In: the rollouts of a group that are fit for training, with their streams stamped. Out: the answer of a gate. To ask every gate, and what
becomes of a group that one of them turns away, is the caller's work. A gate that looks at advantages never turns a group away that
another loss component trains on.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from jaxrl.config.tasks import AdvantageRangeGateConfig, GateConfig, PythonGateConfig, RewardRangeGateConfig, gate_name
from jaxrl.envs.hooks import imported
from jaxrl.errors import ConfigError
from jaxrl.types import Rollout


class Gate(Protocol):
    """Says of a group whether it is let in. Pure: its answer depends on the rollouts alone, which it leaves as they are."""

    @property
    def name(self) -> str:
        """What it is called in metrics."""
        ...

    def admits(self, rollouts: Sequence[Rollout]) -> bool:
        """Say whether a group is let in.

        Args:
          rollouts: those of the group that are scored and have something to train on, with stamped samples; at least one.
        """
        ...


@dataclass(frozen=True, slots=True)
class AdvantageRangeGate:
    """Turns a group away if every trainable token's advantage is within a range and nothing else would be trained.

    The range 0 to 0 is a group without a signal: all its rewards are equal. A group with tokens of another loss component (a non-zero ce
    or ref_kl weight) is let in, and so is one whose advantages were never assigned, or that has no token for the rl loss: there is
    nothing to judge.
    """

    low: float = 0.0
    """Lower end, which belongs to the range."""
    high: float = 0.0
    """Upper end, which belongs to the range."""
    name: str = "advantage_range"
    """What it is called in metrics."""

    def admits(self, rollouts: Sequence[Rollout]) -> bool:
        """Say whether a group is let in."""
        num_judged = 0
        for sample in (sample for rollout in rollouts for sample in rollout.samples):
            members = sample.members()
            if members.ce.any() or members.ref_kl.any():
                return True
            if not members.rl.any():
                continue
            if sample.advantages is None:
                return True
            advantages = sample.advantages[members.rl]
            if not ((advantages >= self.low) & (advantages <= self.high)).all():
                return True
            num_judged += advantages.size
        return num_judged == 0


@dataclass(frozen=True, slots=True)
class RewardRangeGate:
    """Lets a group in if the mean of its rewards is within a range. Missing rewards are left out; a group without any is let in."""

    low: float
    """Lower end, which belongs to the range."""
    high: float
    """Upper end, which belongs to the range."""
    name: str = "reward_range"
    """What it is called in metrics."""

    def admits(self, rollouts: Sequence[Rollout]) -> bool:
        """Say whether a group is let in."""
        rewards = [rollout.score for rollout in rollouts if rollout.is_scored]
        return not rewards or self.low <= math.fsum(rewards) / len(rewards) <= self.high


@dataclass(frozen=True, slots=True)
class PythonGate:
    """A function of the user's own."""

    name: str
    """What it is called in metrics."""
    function: Callable[[list[Rollout]], Any]
    """Called with the rollouts, in the event loop of the run."""
    import_path: str
    """Where it was found, for messages."""

    def admits(self, rollouts: Sequence[Rollout]) -> bool:
        """Say whether a group is let in.

        Raises:
          TypeError: the function returned something else than True or False.
          Exception: what the function raised.
        """
        answer = self.function(list(rollouts))
        if isinstance(answer, bool | np.bool_):
            return bool(answer)
        if inspect.iscoroutine(answer):
            answer.close()
        raise TypeError(f"`{self.import_path}` returned {answer!r:.80}, a {type(answer).__name__}; a gate returns True or False")


def build_gates(configs: Iterable[GateConfig]) -> tuple[Gate, ...]:
    """Return the gates of one environment, in order.

    Raises:
      ConfigError: a function of the user's own cannot be imported, is a coroutine function, or does not take its arguments.
    """
    gates: list[Gate] = []
    for config in configs:
        match config:
            case AdvantageRangeGateConfig():
                gates.append(AdvantageRangeGate(config.low, config.high))
            case RewardRangeGateConfig():
                gates.append(RewardRangeGate(config.low, config.high))
            case PythonGateConfig():
                gates.append(_python_gate(config))
    return tuple(gates)


def _python_gate(config: PythonGateConfig) -> PythonGate:
    where = f"gate {gate_name(config)!r}: `import_path`={config.import_path!r}"
    function = imported(config.import_path, where)
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{where} is a coroutine function; a gate is a plain function of the rollouts, and waits for nothing")
    try:
        inspect.signature(function).bind([], **config.kwargs)
    except TypeError as error:
        given = ", ".join(["rollouts", *(f"{key}=..." for key in config.kwargs)])
        raise ConfigError(f"{where} cannot be called with ({given}): {error}; mend its parameters or `kwargs`") from error
    except ValueError:  # some functions of C have no signature
        pass
    return PythonGate(config.name, partial(function, **config.kwargs), config.import_path)
