"""What checks play with instead of a model: a session that says what it was told to, and the algorithm that a run would build.

In: an examination, an environment. Out: rollouts of replies alone, and how long their prompts were. Whatever an environment does
meanwhile becomes data, and ends within a deadline. It judges nothing.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl.config.env import EnvBase, env_name
from jaxrl.doctor.examination import Examination
from jaxrl.envs.base import Demonstration, Environment, Message, Reply, TaskSpec, ToolSchema, demonstrated_turns
from jaxrl.envs.play import play_rollout
from jaxrl.inference.rendering import Renderer, RenderState
from jaxrl.orchestrator.algo import Algorithm, AlgorithmContext, build_algorithm
from jaxrl.orchestrator.connections import UnservedPolicy
from jaxrl.tasks import task_of
from jaxrl.types import Node, Rollout

PROBED_TASKS = 16
"""Tasks of each environment that are played."""
PLAY_DEADLINE_S = 10.0
"""How long one of them may take, its scorer included; what it asked is known then, even if its scorer is slow."""


class OneReply:
    """A session that answers everything with the same text, and measures what it was asked.

    Args:
      renderer: messages to ids, with the policy's tokenizer.
      rollout: where its replies are recorded, and nothing else: what rewards each turn must know how many there were.
      said: the text; with one for each turn, the last one answers all further turns too.
    """

    def __init__(self, renderer: Renderer, rollout: Rollout, said: Demonstration = "") -> None:
        self.lengths: list[int] = []
        """Tokens of each prompt."""
        self._renderer = renderer
        self._rollout = rollout
        self._said = demonstrated_turns(said) or ("",)
        self._state: RenderState | None = None
        self._num_turns = 0

    async def ask(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> Reply:
        """Note the prompt's length and reply."""
        turn = self._renderer.open_turn(self._state, messages, tools=tools)
        self.lengths.append(len(turn.prompt_ids))
        text = self._said[min(self._num_turns, len(self._said) - 1)]
        written = self._renderer.encode(text, add_special_tokens=False)
        self._state = self._renderer.close_turn(turn, np.append(written, self._renderer.turn_end_id))
        self._num_turns += 1
        node = Node(None, "assistant", text, written, sampled=True, num_sampled=len(written), source="demonstrations")
        self._rollout.nodes.append(node)
        said = self._state.reply
        return Reply(text, is_stopped=True, num_tokens=0, content=said.content, reasoning=said.reasoning, tool_calls=said.tool_calls)

    def fork(self) -> OneReply:
        """Return a session that goes on from here and notes lengths in the same list."""
        return copy.copy(self)

    def restart(self) -> OneReply:
        """Return a session in which nothing was said yet and which notes lengths in the same list."""
        other = copy.copy(self)
        other._state, other._num_turns = None, 0
        return other


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
        rollout = rollout_of(env, spec)
        session = OneReply(exam.renderer, rollout)
        await play_rollout(env, rollout, session, PLAY_DEADLINE_S)
        return rollout, session.lengths

    return list(await asyncio.gather(*(play(spec) for spec in spread(env.tasks(), PROBED_TASKS))))


def algorithm_of(
    exam: Examination, env_config: EnvBase, demonstration: Callable[[TaskSpec], Demonstration | None] = lambda spec: None
) -> Algorithm:
    """Return the algorithm of a training environment as the run builds it, but for the policy; nothing is connected yet."""
    context = AlgorithmContext(
        env_name=env_name(env_config), renderer=exam.renderer, window=exam.config.engine.max_model_len, demonstration=demonstration
    )
    return build_algorithm(exam.config.orchestrator.algo_of(env_config), UnservedPolicy(), context)
