"""What an evaluation is going to play: every episode by name, in one order, before the first of them begins.

In: an environment's tasks, and the parameters of an evaluation. Out: episodes, each with all that its sampling depends on, and a record
by which a folder of half an evaluation knows whether it is the same one. Nothing is played here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.config.evals import EvalConfig, EvalParameters
from jaxrl.config.turns import History
from jaxrl.envs.base import Environment, TaskSpec
from jaxrl.errors import ConfigError
from jaxrl.tasks.identity import fingerprint, unique_task_ids
from jaxrl.types import Rollout, Task


@dataclass(frozen=True, slots=True)
class PlannedEpisode:
    """One episode that is to be played."""

    position: int
    """Its place in the plan, and of its row in the file."""
    episode_id: str
    """`<task>|s<seed>|n<sample>`, without the seed if the plan has none; unique in the plan."""
    question: str
    """What is asked: the same for all samples of one task and seed."""
    task: Task
    """The task; its spec is the environment's own, or a copy with `seed` set."""
    index: int
    """Place of the task: the spec's `index`, or else where the environment's list has it."""
    sample: int
    """0-based, among the episodes of one question."""
    draw_index: int
    """Place of the question in the plan; with `sample`, all that the sampling keys of an episode depend on."""
    split: str | None
    """The task's `split`, or that of the evaluation."""

    def rollout(self, scope: str) -> Rollout:
        """Return a fresh attempt at it.

        Args:
          scope: makes its requests' names unique among those that are alive.
        """
        return Rollout(task=self.task, group_id=f"{scope}/{self.position}", member=self.sample, draw_index=self.draw_index)


def plan_episodes(env: Environment, parameters: EvalParameters) -> list[PlannedEpisode]:
    """Return the episodes of an evaluation: tasks, within each the seeds, within each the samples.

    Raises:
      ConfigError: the environment has no tasks, or two with one id, or two that would be the same under one seed.
    """
    specs = env.tasks()[: parameters.limit]
    try:
        ids = unique_task_ids(specs)
    except ValueError as error:
        raise ConfigError(f"env {env.name!r}: {error}") from None
    if parameters.seeds:
        _require_more_than_a_seed(env.name, specs)
    plan: list[PlannedEpisode] = []
    questions = ((place, seed) for place in range(len(specs)) for seed in parameters.seeds or (None,))
    for draw_index, (place, seed) in enumerate(questions):
        spec = specs[place] if seed is None else {**specs[place], "seed": seed}
        question = ids[place] if seed is None else f"{ids[place]}|s{seed}"
        index, split = spec.get("index"), spec.get("split", parameters.split)
        for sample in range(parameters.samples_per_task):
            plan.append(
                PlannedEpisode(
                    position=len(plan),
                    episode_id=f"{question}|n{sample}",
                    question=question,
                    task=Task(env_name=env.name, id=ids[place], spec=spec),
                    index=index if type(index) is int else place,
                    sample=sample,
                    draw_index=draw_index,
                    split=None if split is None else str(split),
                )
            )
    return plan


def plan_record(
    config: EvalConfig, plan: Sequence[PlannedEpisode], *, step: int, history: History, has_demonstrations: bool
) -> dict[str, Any]:
    """Return what two evaluations must share for the rows of one to be rows of the other; a JSON object with its own hash.

    Raises:
      ConfigError: a task is no JSON value.
    """
    record: dict[str, Any] = {
        "config": config.model_dump(mode="json"),
        "env_name": plan[0].task.env_name,
        "step": step,
        "history": history,
        "demonstration_nll": has_demonstrations,
        "num_planned": len(plan),
        "tasks_sha": _fingerprint([episode.task for episode in plan if episode.sample == 0]),
    }
    return record | {"sha": sha_of(record)}


def _fingerprint(tasks: Sequence[Task]) -> str:
    try:
        return fingerprint([task.spec for task in tasks], allow_nan=True)
    except ValueError as error:
        raise ConfigError(f"env {tasks[0].env_name!r}: {error}") from error


def _require_more_than_a_seed(env_name: str, specs: Sequence[TaskSpec]) -> None:
    """Raise ConfigError if two tasks differ in nothing but their seeds, which those of the evaluation would take the place of."""
    seen: dict[str, TaskSpec] = {}
    for spec in specs:
        other = seen.setdefault(canonical_json({key: value for key, value in spec.items() if key not in ("id", "seed")}), spec)
        if "seed" in spec and "seed" in other and spec["seed"] != other["seed"]:
            raise ConfigError(
                f"env {env_name!r}: tasks {other['id']!r} and {spec['id']!r} differ in their seeds alone ({other['seed']!r} and "
                f"{spec['seed']!r}), and the `seeds` of an evaluation take their place; leave `seeds` out, or give each task one seed"
            )


def first_difference(before: Any, after: Any) -> str | None:
    """Say where two JSON values differ first, in the order of `after`; None if they are equal.

    Example:
      >>> first_difference({"config": {"limit": 3, "model": "m"}}, {"config": {"limit": 5, "model": "n"}})
      '`config.limit` is 3 there and 5 here'
    """
    old, new = dict(_leaves(before)), dict(_leaves(after))
    for name in [*new, *(name for name in old if name not in new)]:
        if name not in old or name not in new or old[name] != new[name]:
            there, here = (json.dumps(values[name]) if name in values else "absent" for values in (old, new))
            return f"`{name}` is {there} there and {here} here"
    return None


def canonical_json(value: Any) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces; what JSON has no word for as text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)


def sha_of(value: Any) -> str:
    """Return a short hash of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and (value or not path):
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
