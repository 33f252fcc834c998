"""What a run learns, as its views show it: curves of reward, cross-entropy and distance to the reference, the headline first.

In: the metrics of each step. Out: the step's figures, and curves over the steps. Which there are follows from the tokens that are trained
on: the policy plays the rollouts whose tokens feed the rl or the ref_kl loss. Where it plays none, rewards are those of somebody else's
replies: they are no learning, and the cross-entropy is the headline. No algorithm is known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jaxrl.monitors import metrics

MAX_ENVS = 4
"""More environments than these have no reward of their own on a line; `metrics.jsonl` has all."""
PLAYED_COMPONENTS = ("rl", "ref_kl")
"""The losses whose tokens the policy itself sampled."""
_PER_ENV = f"{metrics.REWARD_MEAN}/"


@dataclass(slots=True)
class Curve:
    """One number over the steps."""

    label: str
    """What it is, in a word or two."""
    is_better_high: bool
    """Whether learning raises it."""
    values: list[float] = field(default_factory=list)
    """One per step that has it."""

    @property
    def best(self) -> str:
        """The best value so far, in words."""
        return f"best {max(self.values):.3f}" if self.is_better_high else f"lowest {min(self.values):.3f}"

    def ends(self) -> tuple[float, float, int]:
        """Return the means of the first and the last few values, and how many those are."""
        num = max(1, min(5, len(self.values) // 2))
        return sum(self.values[:num]) / num, sum(self.values[-num:]) / num, num


class Learning:
    """The curves of one run."""

    def __init__(self) -> None:
        self._reward = Curve("reward", is_better_high=True)
        self._nll = Curve("NLL", is_better_high=False)
        self._ref_kl = Curve("reference KL", is_better_high=False)
        self._of_env: dict[str, Curve] = {}
        self._has_play = False
        self._played: set[str] = set()

    @property
    def is_imitation(self) -> bool:
        """True if tokens were trained on and the policy sampled none of them."""
        return bool(self._nll.values) and not self._has_play

    def add(self, values: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        self._has_play |= any(values.get(f"tokens/{component}", 0) > 0 for component in PLAYED_COMPONENTS)
        for name, value in values.items():
            if name.startswith(_PER_ENV) and math.isfinite(value):
                env_name = name.removeprefix(_PER_ENV)
                self._of_env.setdefault(env_name, Curve(env_name, is_better_high=True)).values.append(value)
                if any(values.get(metrics.member_tokens(component, env_name), 0) > 0 for component in PLAYED_COMPONENTS):
                    self._played.add(env_name)
        for curve, value in ((self._reward, values.get(metrics.REWARD_MEAN)), (self._nll, _nll(values)), (self._ref_kl, _ref_kl(values))):
            if value is not None and math.isfinite(value):
                curve.values.append(value)

    def curves(self) -> list[Curve]:
        """Return the curves that have a value, the headline first; the reward of somebody else's replies is none."""
        shown = [self._nll] if self.is_imitation else [self._reward, self._nll, self._ref_kl]
        return [curve for curve in shown if curve.values]

    def of_envs(self) -> list[Curve]:
        """Return the rewards of single environments, those that the policy plays first; none if there is one alone, or too many."""
        ordered = sorted(self._of_env.values(), key=lambda curve: curve.label not in self._played)
        return ordered if 1 < len(ordered) <= MAX_ENVS else []

    def figures(self, values: Mapping[str, float], *, is_per_env: bool = False) -> list[tuple[str, str]]:
        """Return what of a step's metrics says how learning goes: label and value, the headline first.

        Args:
          values: the metrics of a step.
          is_per_env: behind the reward stands that of each environment.
        """
        found: list[tuple[str, str]] = []
        if metrics.REWARD_MEAN in values:
            single = [(curve.label, values.get(metrics.reward_mean(curve.label))) for curve in self.of_envs() if is_per_env]
            found.append(("reward", f"{values[metrics.REWARD_MEAN]:.3f}{_listed(single)}"))
        for label, value in ((self._nll.label, _nll(values)), (self._ref_kl.label, _ref_kl(values))):
            if value is not None:
                found.append((label, f"{value:.3f}"))
        return sorted(found, key=lambda figure: figure[0] == "reward") if self.is_imitation else found


def _listed(rewards: Iterable[tuple[str, float | None]]) -> str:
    shown = ", ".join(f"{env_name} {value:.3f}" for env_name, value in rewards if value is not None)
    return f" ({shown})" if shown else ""


def _nll(values: Mapping[str, float]) -> float | None:
    return values.get(metrics.CE_NLL_MEAN) if values.get("tokens/ce", 0) > 0 else None


def _ref_kl(values: Mapping[str, float]) -> float | None:
    log_ratio = values.get(metrics.REF_LOG_RATIO_MEAN) if values.get("tokens/ref_kl", 0) > 0 else None
    return None if log_ratio is None else -log_ratio
