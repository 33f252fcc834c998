"""Questions that the policy may answer with the help of tools, in several turns.

In: tasks with a question each, tools, a scorer. Out: a `ChatEnvironment` in which the calls of a reply are answered one after another,
and a reply without a call is the answer.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence

from jaxrl.config.env import ToolsEnvConfig, env_name
from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.base import Demonstration, Message, Score, TaskSpec
from jaxrl.envs.chat import ChatEnvironment, Episode
from jaxrl.envs.gym_questions import GymQuestions, gym_questions
from jaxrl.envs.hooks import scored
from jaxrl.envs.tools.calculator import calculate, calculator
from jaxrl.envs.tools.python import python_tool
from jaxrl.envs.tools.tool import ToolError
from jaxrl.envs.tools.toolbox import Toolbox
from jaxrl.inference.rendering.tool_calls import call_text

logger = logging.getLogger(__name__)

UNPARSED = "tools/unparsed"
WARN_AFTER_REPLIES = 16
"""So many replies are seen before a parser is suspected."""


class ToolEnvironment(ChatEnvironment):
    """Ask a question, answer calls of tools, score the first reply without one.

    Args:
      name: name in metrics and logs.
      tasks: the task specs, each with a `question`.
      toolbox: the tools.
      score: (spec, text of the answer) -> its worth, or None; a coroutine function, or a plain one, which runs in a thread of its own.
      opening: messages before the question.
      budget: when a conversation ends though the policy still calls tools; it is then worth 0.
      describe: tell the policy of the tools at the beginning of each conversation.
      require_stop: an answer that the token limit cut is worth 0 without asking `score`.
      demonstration: spec -> the reference replies.
      score_deadline_s: a plain function that runs longer gives no reward, though its thread goes on.
      close: gives back what `score` holds.

    Note: metrics are lost with a rollout that a tool ends; its failure says which tool.
    """

    def __init__(
        self,
        name: str,
        tasks: Sequence[TaskSpec],
        toolbox: Toolbox,
        *,
        score: Score,
        opening: Sequence[Message] = (),
        budget: BudgetConfig | None = None,
        describe: bool = True,
        require_stop: bool = True,
        demonstration: Callable[[TaskSpec], Demonstration | None] = lambda spec: None,
        score_deadline_s: float = 30.0,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name, tasks, budget=budget)
        self.tools = toolbox.schemas if describe else ()
        self._toolbox = toolbox
        self._opening = list(opening)
        self._scorer = score
        self._require_stop = require_stop
        self._score_deadline_s = score_deadline_s
        self._demonstration = demonstration
        self._close = close
        self._num_replies = self._num_unparsed = 0
        self._has_warned = False

    async def reset(self, episode: Episode) -> Sequence[Message]:
        """Return the question, and what comes before it."""
        episode.metrics |= {**self._toolbox.empty_counts(), UNPARSED: 0.0}
        return [*self._opening, {"role": "user", "content": episode.spec["question"]}]

    async def done(self, episode: Episode) -> bool:
        """Say that a whole reply without a call is the answer."""
        self._look_for_unparsed(episode)
        return episode.last.is_stopped and not episode.last.tool_calls

    async def reply(self, episode: Episode) -> Sequence[Message]:
        """Answer the calls, one after another."""
        return [await self._toolbox.answer(call, episode.metrics) for call in episode.last.tool_calls]

    async def score(self, episode: Episode) -> float | None:
        """Score the answer; a conversation that ended before there was one is worth 0."""
        last = episode.last
        if last.tool_calls or (self._require_stop and not last.is_stopped):
            return 0.0
        return await scored(self._scorer, episode.spec, last.text, deadline_s=self._score_deadline_s)

    def demonstration(self, spec: TaskSpec) -> Demonstration | None:
        """Return the reference replies to a task."""
        return self._demonstration(spec)

    def scored_by(self, score: Score, close: Callable[[], None]) -> ToolEnvironment:
        """Return this environment with another scorer of answers, and what gives back what that one holds."""
        self._close()
        other = copy.copy(self)
        other._scorer, other._close = score, close
        return other

    def close(self) -> None:
        """Give back what the tools and the scorer hold."""
        self._toolbox.close()
        self._close()

    def _look_for_unparsed(self, episode: Episode) -> None:
        """Count replies that look like calls in which none was found, and say so once if most do."""
        is_unparsed = episode.last.has_unread_call
        episode.metrics[UNPARSED] += is_unparsed
        self._num_replies += 1
        self._num_unparsed += is_unparsed
        if not self._has_warned and self._num_replies >= WARN_AFTER_REPLIES and 2 * self._num_unparsed > self._num_replies:
            self._has_warned = True
            logger.warning(
                "env %r: %d of %d replies look like calls of tools, and none was found in them, such as in %r; name the policy's format in "
                "`model.tool_format`",
                self.name, self._num_unparsed, self._num_replies, episode.last.text[:200],
            )  # fmt: skip


def tool_environment(config: ToolsEnvConfig) -> ToolEnvironment:
    """Make the questions and the tools, and build the environment.

    Raises:
      ConfigError: the questions cannot be made, or the function of a tool cannot be used.
    """
    name, questions = env_name(config), gym_questions(config)
    tools = [calculator(config.calculator_name, config.calculator_argument)] if config.calculator else []
    tools += [python_tool(tool, f"env {name!r}") for tool in config.python]
    toolbox = Toolbox(f"env {name!r}", tools, max_result_chars=config.max_result_chars, on_failure=config.on_failure)
    return ToolEnvironment(
        name,
        questions.specs,
        toolbox,
        score=questions.score,
        opening=questions.opening,
        budget=config.budget,
        describe=config.describe,
        require_stop=questions.require_stop,
        demonstration=lambda spec: _demonstration(config, questions, spec),
        close=questions.close,
    )


def _demonstration(config: ToolsEnvConfig, questions: GymQuestions, spec: TaskSpec) -> Demonstration | None:
    """Return a call of the calculator and the answer; the answer alone where the calculator is no help."""
    answer = spec["answer"]
    expression = questions.items[spec["id"]].get("metadata", {}).get("expression")
    if answer is None or not config.calculator or not isinstance(expression, str):
        return answer
    try:
        is_help = calculate(expression) == answer.strip()
    except ToolError:
        is_help = False
    if not is_help:
        return answer
    return [call_text(config.demonstration_format, config.calculator_name, {config.calculator_argument: expression}), answer]
