"""Where a run meets the task sampler and the gates of an environment: drawing a task, learning from a group, admitting it.

In: an environment; the rollouts of one of its groups, once they are credited. Out: a task, a sampler that has learnt, the answers of the
gates. A sampler and a gate are parts of the run's configuration, so what they raise ends the run, in words and under their name. Nothing
here decides when a task is drawn, nor what becomes of a group.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxrl.blame import blame, in_words
from jaxrl.errors import RunFailedError
from jaxrl.orchestrator.sampler import TrainEnv
from jaxrl.tasks import TaskSampler, TaskSpec
from jaxrl.types import Rollout

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

COMPLETION_TOKENS = "completion_tokens"
"""The cost that every rollout has, whatever its environment reports."""


def draw_task(env: TrainEnv) -> TaskSpec:
    """Draw one task.

    Raises:
      RunFailedError: the sampler failed, or has no task left.
    """

    def sample() -> list[TaskSpec]:
        try:
            drawn = list(env.tasks.sample(1))
        except StopIteration:
            return []
        if len(drawn) > 1:
            raise ValueError(f"`sample(1)` returned {len(drawn)} tasks")
        return drawn

    drawn = _asked(env.name, "it was asked for a task", sample)
    if not drawn:
        raise _failed(
            _sampler_of(env.name),
            f"the task sampler of environment {env.name!r} has no task left, and every group needs one; let it begin again after its last "
            "task, give it more of them, or lower `run.max_steps`",
        )
    return drawn[0]


def learn(env: TrainEnv, spec: TaskSpec, rollouts: Sequence[Rollout], costs: Sequence[float]) -> None:
    """Let an environment's task sampler learn from a group, before any gate or filter sees it.

    The reward of a rollout without samples is missing here, as it is in the baseline: nothing is learnt from it.

    Args:
      env: the environment.
      spec: the task, as it was drawn.
      rollouts: all of the group, credited; one that failed or was not scored has no reward.
      costs: one per rollout.

    Raises:
      RunFailedError: the sampler failed.
    """
    rewards = [r.reward if r.is_scored and r.samples else None for r in rollouts]
    _asked(env.name, "it was told of a group", lambda: env.tasks.update(spec, rewards, costs))


def sampler_metrics(env: TrainEnv) -> dict[str, float]:
    """Return what an environment's task sampler reports.

    Raises:
      RunFailedError: the sampler failed, or reports something else than numbers.
    """
    return _asked(
        env.name, "it was asked for its metrics", lambda: {str(name): float(value) for name, value in env.tasks.metrics().items()}
    )


def sampler_state(env_name: str, tasks: TaskSampler) -> dict[str, Any]:
    """Return the state of an environment's task sampler for a checkpoint.

    Raises:
      RunFailedError: the sampler failed.
    """
    return _asked(env_name, "it was asked for its state", tasks.state_dict)


def check_state_is_json(env_name: str, state: dict[str, Any]) -> None:
    """Refuse a state of a task sampler that a checkpoint could not hold.

    Raises:
      RunFailedError: it is no JSON value.
    """
    _asked(env_name, "its state was written as JSON", lambda: json.dumps(state, allow_nan=False))


def ask(env: TrainEnv, rollouts: Sequence[Rollout]) -> dict[str, bool]:
    """Ask every gate of an environment whether it lets a group into a batch.

    All of them are asked, whatever the first one says, so that each one's share of admitted groups means something.

    Args:
      env: the environment.
      rollouts: the scored survivors of the group, with stamped samples; at least one.

    Returns:
      The answers by the name of the gate; empty without gates.

    Raises:
      RunFailedError: a gate failed, or gave something else than True or False.
    """
    answers: dict[str, bool] = {}
    for gate in env.gates:
        try:
            answers[gate.name] = gate.admits(rollouts)
        except Exception as error:
            raise _failed(
                f"gate {gate.name!r} of environment {env.name!r}",
                f"gate {gate.name!r} of environment {env.name!r} failed on group {rollouts[0].group_id!r} (task {rollouts[0].task.id!r}): "
                f"{in_words(error)}; mend it, or leave it out of the environment's `tasks.gates`",
            ) from error
    return answers


class CostReader:
    """Reads what rollouts cost, and warns once for each environment that does not say."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def read(self, env: TrainEnv, rollouts: Sequence[Rollout]) -> tuple[list[float], int | None]:
        """Return the cost of each rollout, and how many of them were not told it; None if they are not told but counted here.

        A cost that was not told, as of a rollout that failed first, counts as 0, so the sum is a lower bound; so does one below 0, which is
        none. Costs are given for every group, so that a sum is never one of some groups only.

        Args:
          env: the environment; says what a cost is.
          rollouts: all of a group.
        """
        if env.cost == COMPLETION_TOKENS:
            return [float(r.num_completion_tokens) for r in rollouts], None
        told = [cost if (cost := r.metrics.get(env.cost)) is not None and cost >= 0 else None for r in rollouts]
        # A rollout that failed may well not have come to it.
        silent = next((r for r, cost in zip(rollouts, told, strict=True) if cost is None and r.failure is None), None)
        if silent is not None and env.name not in self._warned:
            self._warned.add(env.name)
            logger.warning(
                "env %r, task %r: a rollout that did not fail reports no cost: `tasks.cost`=%r is no number >= 0 among its metrics (%s). "
                "It counts as 0, and so will others; `tasks/%s/missing_costs` counts them",
                env.name, silent.task.id, env.cost, _listed(silent.metrics), env.name,
            )  # fmt: skip
        return [cost or 0.0 for cost in told], told.count(None)


def _asked(env_name: str, when: str, question: Callable[[], Answer]) -> Answer:
    """Return what a task sampler answers, and turn what it raises into the end of the run, in words.

    No context manager: those take a RuntimeError that comes of a StopIteration for the latter, which no coroutine may raise.
    """
    try:
        return question()
    except Exception as error:
        raise _failed(
            _sampler_of(env_name),
            f"the task sampler of environment {env_name!r} failed when {when}: {in_words(error)}; mend it, or choose another "
            "`type` in the environment's `tasks`",
        ) from error


def _failed(component: str, message: str) -> RunFailedError:
    return blame(RunFailedError(message), component)


def _sampler_of(env_name: str) -> str:
    return f"task sampler of environment {env_name!r}"


def _listed(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in sorted(metrics.items())) or "it has none"
