"""What checks play with instead of a model: a session that gives one reply to everything, and the algorithm that a run would build.

In: an examination, an environment. Out: rollouts without tokens, and how long their prompts were. Whatever an environment does
meanwhile becomes data, and ends within a deadline. It judges nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from jaxrl.config.env import EnvBase, env_name
from jaxrl.doctor.examination import Examination
from jaxrl.envs.base import Environment, Message, Reply, TaskSpec
from jaxrl.envs.play import play_rollout
from jaxrl.inference.rendering import Renderer
from jaxrl.orchestrator.algo import Algorithm, AlgorithmContext, build_algorithm
from jaxrl.orchestrator.connections import UnservedPolicy
from jaxrl.tasks import task_of
from jaxrl.types import Rollout

PROBED_TASKS = 16
"""Tasks of each environment that are played."""
PLAY_DEADLINE_S = 10.0
"""How long one of them may take, its scorer included; what it asked is known then, even if its scorer is slow."""


class OneReply:
    """A session that answers everything with the same text, and measures what it was asked."""

    def __init__(self, renderer: Renderer, text: str = "") -> None:
        self.lengths: list[int] = []
        """Tokens of each prompt."""
        self._renderer = renderer
        self._text = text

    async def ask(self, messages: Sequence[Message]) -> Reply:
        """Note the prompt's length and reply."""
        self.lengths.append(len(self._renderer.open_turn(None, messages).prompt_ids))
        return Reply(text=self._text, is_stopped=True, num_tokens=0)


def spread(tasks: Sequence[TaskSpec], num: int) -> list[TaskSpec]:
    """Return at most `num` tasks, from the whole length of the list: difficulties may stand one after another.

    Example:
      >>> [spec["id"] for spec in spread([{"id": i} for i in range(10)], 3)]
      [0, 3, 6]
    """
    return [tasks[len(tasks) * i // num] for i in range(num)] if len(tasks) > num else list(tasks)


def rollout_of(env: Environment, spec: TaskSpec) -> Rollout:
    """Return a rollout that nobody has played."""
    return Rollout(task=task_of(env.name, spec), group_id="doctor", member=0, draw_index=0)


async def play_empty(exam: Examination, env: Environment) -> list[tuple[Rollout, list[int]]]:
    """Play some tasks with empty replies.

    Returns:
      Each rollout, which may have failed, with the lengths of its prompts in tokens.
    """

    async def play(spec: TaskSpec) -> tuple[Rollout, list[int]]:
        session, rollout = OneReply(exam.renderer), rollout_of(env, spec)
        await play_rollout(env, rollout, session, PLAY_DEADLINE_S)
        return rollout, session.lengths

    return list(await asyncio.gather(*(play(spec) for spec in spread(env.tasks(), PROBED_TASKS))))


def algorithm_of(
    exam: Examination, env_config: EnvBase, demonstration: Callable[[TaskSpec], str | None] = lambda spec: None
) -> Algorithm:
    """Return the algorithm of a training environment as the run builds it, but for the policy; nothing is connected yet."""
    context = AlgorithmContext(
        env_name=env_name(env_config), renderer=exam.renderer, window=exam.config.engine.max_model_len, demonstration=demonstration
    )
    return build_algorithm(exam.config.orchestrator.algo_of(env_config), UnservedPolicy(), context)
