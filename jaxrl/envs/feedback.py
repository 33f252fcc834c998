"""Questions with several attempts: a wrong answer is told so, with a hint, and the policy may try again.

In: tasks with a question and an answer each, a scorer, a hint. Out: a `ChatEnvironment` that ends with the first right answer (`solved`)
or when no attempt is left (`max_turns`). Running out of attempts is an end of the task like any other, and cuts nothing short.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation

from jaxrl.config.env import FeedbackEnvConfig, env_name
from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.answers import extract_answer
from jaxrl.envs.base import Demonstration, Message, Score, TaskSpec
from jaxrl.envs.chat import ChatEnvironment, Episode
from jaxrl.envs.gym_questions import gym_questions
from jaxrl.envs.hooks import scored


class FeedbackEnvironment(ChatEnvironment):
    """Ask a question until the answer is right, or no attempt is left.

    An attempt is right if it is worth 1 or more. The rollout is worth its last attempt; attempt k counts `discount ** (k - 1)` of what
    its answer is worth.

    Args:
      name: name in metrics and logs.
      tasks: the task specs, each with a `question` and an `answer`.
      score: (spec, text of an attempt) -> its worth, or None; a coroutine function, or a plain one, which runs in a thread of its own.
      hint: what a wrong attempt is answered with; see `hint_after`.
      opening: messages before the question.
      budget: how many attempts there are (`max_turns`), and what else ends a conversation.
      discount: what each further attempt costs, 0 to 1.
      turn_rewards: give each attempt its worth as the reward of its turn too.
      require_stop: an attempt that the token limit cut is worth 0 without asking `score`.
      score_deadline_s: a plain function that runs longer gives no reward, though its thread goes on.
      close: gives back what `score` holds.
    """

    def __init__(
        self,
        name: str,
        tasks: Sequence[TaskSpec],
        *,
        score: Score,
        hint: str,
        opening: Sequence[Message] = (),
        budget: BudgetConfig,
        discount: float = 1.0,
        turn_rewards: bool = False,
        require_stop: bool = True,
        score_deadline_s: float = 30.0,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name, tasks, budget=budget)
        self._scorer = score
        self._hint = hint
        self._opening = list(opening)
        self._max_turns = budget.max_turns
        self._discount = discount
        self._turn_rewards = turn_rewards
        self._require_stop = require_stop
        self._score_deadline_s = score_deadline_s
        self._close = close

    async def reset(self, episode: Episode) -> Sequence[Message]:
        """Return the question, and what comes before it."""
        return [*self._opening, {"role": "user", "content": episode.spec["question"]}]

    async def done(self, episode: Episode) -> str | bool:
        """Judge the attempt; say `solved` if it is right, and `max_turns` if it was the last one."""
        attempt = len(episode.replies)
        worth = await self._worth(episode)
        value = None if worth is None else worth * self._discount ** (attempt - 1)
        episode.state["value"] = value
        if self._turn_rewards:
            episode.turn_rewards.append(0.0 if value is None else value)
        if worth is not None and worth >= 1:
            return "solved"
        return "max_turns" if episode.last.is_stopped and attempt >= self._max_turns else False

    async def reply(self, episode: Episode) -> str:
        """Return the hint."""
        attempt = len(episode.replies)
        answer = episode.spec.get("answer")
        return hint_after(self._hint, episode.last.text, answer, attempt=attempt, left=self._max_turns - attempt)

    async def score(self, episode: Episode) -> float | None:
        """Return what the last attempt is worth."""
        return episode.state["value"]

    def demonstration(self, spec: TaskSpec) -> Demonstration | None:
        """Return the answer, at the first attempt."""
        return spec.get("answer")

    def scored_by(self, score: Score, close: Callable[[], None]) -> FeedbackEnvironment:
        """Return this environment with another scorer, and what gives back what that one holds."""
        self._close()
        other = copy.copy(self)
        other._scorer, other._close = score, close
        return other

    def close(self) -> None:
        """Give back what the scorer holds."""
        self._close()

    async def _worth(self, episode: Episode) -> float | None:
        if self._require_stop and not episode.last.is_stopped:
            return 0.0
        return await scored(self._scorer, episode.spec, episode.last.text, deadline_s=self._score_deadline_s)


def feedback_environment(config: FeedbackEnvConfig) -> FeedbackEnvironment:
    """Make the questions and build the environment.

    Raises:
      ConfigError: the questions cannot be made.
    """
    questions = gym_questions(config)
    return FeedbackEnvironment(
        env_name(config),
        questions.specs,
        score=questions.score,
        hint=config.hint,
        opening=questions.opening,
        budget=config.budget,
        discount=config.discount,
        turn_rewards=config.turn_rewards,
        require_stop=questions.require_stop,
        close=questions.close,
    )


def hint_after(hint: str, text: str, answer: str | None, *, attempt: int, left: int) -> str:
    """Fill in a hint: `{attempt}` and `{left}` are numbers, `{direction}` says of a number that it is too low or too high.

    `{direction}` is empty where the right answer is no number, and `not a number` where the attempt is none.

    Example:
      >>> hint_after("Wrong ({direction}), {left} left.", "<think>8+3</think> 10", "11", attempt=1, left=2)
      'Wrong (too low), 2 left.'
      >>> hint_after("{direction}", "ten", "11", attempt=1, left=2)
      'not a number'
    """
    right, given = _number(answer or ""), _number(extract_answer(text))
    direction = ""
    if right is not None:
        direction = "not a number" if given is None else "too low" if given < right else "too high" if given > right else ""
    return hint.format(attempt=attempt, left=left, direction=direction)


def _number(text: str) -> Decimal | None:
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
