"""The numbers of one step: what was decided while it was collected, how stale it is, where the time went.

In: decisions, committed groups, filter matches, the state of the dispatch gate. Out: metrics by name. Means are over
rollouts with an explicit count, never means of means; a number that is undefined is left out. Nothing here decides
anything.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from jaxrl.monitors import metrics as names
from jaxrl.orchestrator.filters import is_zero_advantage
from jaxrl.types import COMPONENTS, Bucket, Failure, Rollout, TrainingSample, staleness_steps

LAG_SAMPLES = 1000
"""Measurements of the event loop's lag that are kept, the newest ones."""
LAG_INTERVAL_S = 0.1
"""Time between two of them."""


class StepTally:
    """Everything decided since the last step shipped."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin the next step."""
        self._rollouts: list[tuple[int, Rollout]] = []
        self._num_credited_groups = 0
        self._num_zero_signal_groups = 0
        self._num_scored_groups = 0
        self._num_partial_groups = 0
        self._matched: Counter[str] = Counter()
        self._examined: Counter[str] = Counter()
        self._missing_costs: Counter[str] = Counter()
        self._num_asked: Counter[str] = Counter()
        self._num_admitted: Counter[str] = Counter()
        self._let_in: dict[str, Counter[str]] = {}

    def add_rollout(self, order: int, rollout: Rollout) -> None:
        """Enter a decided rollout of the group at position `order` in the order of draws."""
        self._rollouts.append((order, rollout))

    def add_group(self, rollouts: Sequence[Rollout]) -> None:
        """Enter a committed group.

        It is partial if some but not all of its rollouts are scored and have samples. Of the groups whose credit feeds the rl loss, one
        has no signal if every advantage is exactly 0 and no other component trains on it either.
        """
        scored = [r for r in rollouts if r.is_scored and r.samples]
        self._num_scored_groups += len(scored) > 0
        self._num_partial_groups += 0 < len(scored) < len(rollouts)
        if any(_feeds_rl(sample) for r in scored for sample in r.samples):
            self._num_credited_groups += 1
            self._num_zero_signal_groups += all(map(is_zero_advantage, scored))

    def add_matches(self, matched: Mapping[str, int], num_examined: int) -> None:
        """Enter what one pass of filters matched; a filter that stands in both places sees a rollout twice."""
        self._matched.update(matched)
        self._examined.update(dict.fromkeys(matched, num_examined))

    def add_missing_costs(self, env_name: str, num_missing: int) -> None:
        """Enter how many rollouts of a group did not report what they cost; 0 says that they all did."""
        self._missing_costs[env_name] += num_missing

    def add_answers(self, env_name: str, answers: Mapping[str, bool]) -> None:
        """Enter what each gate of an environment said of one group."""
        self._num_asked[env_name] += 1
        self._num_admitted[env_name] += all(answers.values())
        self._let_in.setdefault(env_name, Counter()).update(answers)

    def gates_in_words(self) -> str:
        """Say how many groups each environment's gates let in, and how often each gate said no; empty if no gate was asked."""
        sentences = []
        for env_name, asked in self._num_asked.items():
            refusals = ", ".join(f"{name!r} said no to {asked - let_in}" for name, let_in in self._let_in[env_name].items())
            sentences.append(f"the gates of environment {env_name!r} let in {self._num_admitted[env_name]} of {asked} groups ({refusals})")
        return "; ".join(sentences)

    def rollouts(self) -> list[Rollout]:
        """Return the decided rollouts in draw order, then by member."""
        return [rollout for _, rollout in sorted(self._rollouts, key=lambda entry: (entry[0], entry[1].member))]

    def count_buckets(self) -> Counter[str]:
        """Return how many rollouts ended in each bucket."""
        return Counter(rollout.bucket for _, rollout in self._rollouts)

    def last_failure(self) -> Failure | None:
        """Return why the newest of the failed rollouts failed; None if none did."""
        return next((r.failure for _, r in reversed(self._rollouts) if r.failure is not None), None)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of rollouts, groups, advantages and filters."""
        decided = [r for r in self.rollouts() if r.bucket != Bucket.CANCELLED]
        scored = [r for r in decided if r.is_scored]
        values = _mean(names.REWARD_MEAN, [r.score for r in scored])
        for env_name in dict.fromkeys(r.env_name for r in scored):
            values |= _mean(names.reward_mean(env_name), [r.score for r in scored if r.env_name == env_name])
        values |= _mean(names.REWARD_TRAINED_MEAN, [r.score for r in scored if r.bucket == Bucket.TRAINED])
        played = [r for r in decided if r.failure is None]
        values |= _mean(names.COMPLETION_TOKENS_MEAN, [r.num_completion_tokens for r in played])
        values |= _mean(names.NUM_TURNS_MEAN, [r.num_turns for r in played])
        for env_name in dict.fromkeys(r.env_name for r in played):
            tokens = [r.num_completion_tokens for r in played if r.env_name == env_name]
            values |= _mean(names.completion_tokens_mean(env_name), tokens)
            values |= _mean(names.num_turns_mean(env_name), [r.num_turns for r in played if r.env_name == env_name])
        values |= _means_of_reported(played)
        # Beside the mean of all: staleness that takes the long ones shows here.
        stale = [r for r in decided if r.bucket == Bucket.STALE]
        values |= _mean(names.STALE_COMPLETION_TOKENS_MEAN, [r.num_completion_tokens for r in stale])
        values |= _mean(names.ERROR_FRAC, [r.failure is not None for r in decided])
        values |= _mean(names.TRUNCATED_FRAC, [r.is_truncated for r in decided])
        if self._num_credited_groups:
            values[names.ZERO_SIGNAL_FRAC] = self._num_zero_signal_groups / self._num_credited_groups
        if self._num_scored_groups:
            values[names.PARTIAL_FRAC] = self._num_partial_groups / self._num_scored_groups
        advantages = [a for r in scored if (a := r.mean_advantage()) is not None]
        if advantages:
            values |= _mean(names.ADVANTAGE_MEAN, advantages) | _mean(
                names.ADVANTAGE_ZERO_FRAC, [a == 0 for a in advantages]
            )
            values |= {names.ADVANTAGE_MIN: min(advantages), names.ADVANTAGE_MAX: max(advantages)}
        for name, examined in self._examined.items():
            if examined:
                values[names.filter_frac(name)] = self._matched[name] / examined
        return values | self._task_metrics()

    def _task_metrics(self) -> dict[str, float]:
        """Return what was noted of tasks beside what their samplers report."""
        values = {names.missing_costs(env_name): float(count) for env_name, count in self._missing_costs.items()}
        for env_name, asked in self._num_asked.items():
            values[names.admission_frac(env_name)] = self._num_admitted[env_name] / asked
            values |= {names.gate_frac(env_name, gate): let_in / asked for gate, let_in in self._let_in[env_name].items()}
        return values


def _means_of_reported(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return the mean of each number that rollouts report, per environment, over the rollouts that have it."""
    reported: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            reported.setdefault(names.env_metric(rollout.env_name, name), []).append(value)
    return {name: sum(values) / len(values) for name, values in reported.items()}


def time_metrics(rollouts: Iterable[Rollout], *, generate_s: float, wait_s: float, pack_s: float) -> dict[str, float]:
    """Return where the time of a step went, and how fast the policy wrote the tokens of its decided rollouts."""
    values = {names.GENERATE_S: generate_s, names.WAIT_FOR_POLICY_S: wait_s, names.PACK_S: pack_s}
    if generate_s > 0:
        tokens = sum(node.num_sampled for r in rollouts for node in r.nodes if node.versions is not None)
        values[names.GENERATED_TOKENS_PER_S] = tokens / generate_s
    return values


def staleness_metrics(step: int, rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return mean and maximum staleness of what `step` trains on; nothing if no live policy sampled it."""
    steps = [staleness_steps(step, r.oldest_version) for r in rollouts if r.oldest_version is not None]
    return _mean(names.STALENESS_MEAN, steps) | ({names.STALENESS_MAX: float(max(steps))} if steps else {})


def member_metrics(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Return how many tokens of each environment the step's batch trains on by each loss component; no zeros.

    Args:
      rollouts: those in the batch, with what the packer took of their samples (`packed`).
    """
    counts: Counter[str] = Counter()
    for rollout in rollouts:
        for sample, packed in zip(rollout.samples, rollout.packed, strict=True):
            if packed is not None:
                for component, member in zip(COMPONENTS, sample.members(packed.num_tokens), strict=True):
                    counts[names.member_tokens(component, rollout.env_name)] += int(np.count_nonzero(member))
    return {name: float(count) for name, count in counts.items() if count}


class StepTimer:
    """Splits the time in which a step is collected: dispatch open, or held for a new policy version."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begin the next step, with dispatch open."""
        self._started_s = self._clock()
        self._closed_s = 0.0
        self._closed_since_s: float | None = None

    def set_gate(self, *, is_open: bool) -> None:
        """Say whether groups may be dispatched from here on."""
        if is_open and self._closed_since_s is not None:
            self._closed_s += self._clock() - self._closed_since_s
            self._closed_since_s = None
        elif not is_open and self._closed_since_s is None:
            self._closed_since_s = self._clock()

    def lap(self) -> tuple[float, float]:
        """Return the seconds in which dispatch was open since the step began, and those in which it was held."""
        self.set_gate(is_open=True)
        return self._clock() - self._started_s - self._closed_s, self._closed_s


class LoopLag:
    """Measures how late the event loop runs what is due."""

    def __init__(self) -> None:
        self._lags_s: deque[float] = deque(maxlen=LAG_SAMPLES)

    async def run(self) -> None:
        """Measure until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due_s = clock() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self._lags_s.append(max(0.0, clock() - due_s))

    def metrics(self) -> dict[str, float]:
        """Return the 99th percentile of the newest measurements, in seconds; nothing before the first."""
        return {names.LOOP_LAG_P99: float(np.percentile(self._lags_s, 99))} if self._lags_s else {}


def _feeds_rl(sample: TrainingSample) -> bool:
    """Say whether a sample has credit, and tokens of the rl loss that take it."""
    return sample.advantages is not None and bool(sample.members().rl.any())


def _mean(name: str, values: Sequence[float]) -> dict[str, float]:
    return {name: float(np.mean(values, dtype=np.float64))} if values else {}
