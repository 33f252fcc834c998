"""One rollout of an agent: its requests become turns of conversations with the policy.

In: requests, each with a whole conversation in words. Out: replies, and every token on the rollout. A request that begins with what was
said before goes on from there: from the end of a conversation, or from an earlier point of one, which forks a branch. One that begins
with nothing that is known starts a conversation of its own. Everything here runs in the event loop of the rollout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.config.turns import BudgetConfig
from jaxrl.envs.base import Reply, Session
from jaxrl.envs.gateway.bodies import Ask, Told, over
from jaxrl.errors import EnvError, JaxrlError, PromptTooLongError
from jaxrl.inference.chat.conversations import Key
from jaxrl.inference.chat.refusals import Refusal
from jaxrl.inference.chat.reply_stream import ReplyTeller
from jaxrl.inference.chat.wire import Message, finish_word
from jaxrl.inference.rendering.replies import ParsedReply

MAX_PARALLEL = 16
"""Requests of one rollout that may wait for replies at the same time."""


@dataclass(slots=True)
class _Point:
    """A conversation as far as it has come; it may go on from here more than once."""

    session: Session

    def take(self) -> Session:
        """Return a session that goes on from here; another one stays for whoever comes next."""
        session, self.session = self.session, self.session.fork()
        return session


class Talk:
    """What an agent says and is told in one rollout.

    Args:
      session: the rollout's conversation with the policy, in which nothing was said yet.
      budget: when no further request is answered.
      warn: told what a request says of sampling, which changes nothing.
      clock: seconds.
    """

    def __init__(
        self,
        session: Session,
        budget: BudgetConfig,
        *,
        warn: Callable[[dict[str, Any]], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: Exception | None = None
        """What the policy failed with; no further request is answered."""
        self.failed = asyncio.Event()
        """Set with `failure`."""
        self.limit: str | None = None
        """The limit that was reached, if one was and a request came after it."""
        self.too_long: PromptTooLongError | None = None
        """Why the last request had no reply, if that was its length."""
        self.told: list[Message] = []
        """The replies, as the agent was told them."""
        self._start = _Point(session)
        self._points: dict[Key, _Point] = {}
        self._budget = budget
        self._warn = warn
        self._clock = clock
        self._started_s = clock()
        self._num_tokens = 0
        self._asking: set[asyncio.Task[Any]] = set()
        self._is_over = False

    async def answer(self, ask: Ask) -> Told:
        """Have the policy reply to a request; cancelling it leaves everything as it was.

        Raises:
          Refusal: there is no reply, for a reason that the agent is told.
        """
        self._refuse()
        if ask.unheeded:
            self._warn(ask.unheeded)
        task = asyncio.current_task()
        assert task is not None, "requests are answered in tasks, so that they can be cancelled"
        self._asking.add(task)
        try:
            return await self._reply(ask)
        finally:
            self._asking.discard(task)

    def shut(self) -> None:
        """Answer no further request."""
        self._is_over = True

    async def close(self) -> None:
        """Answer no further request, and give up those that wait for a reply."""
        self.shut()
        for task in self._asking:
            task.cancel()
        if self._asking:
            await asyncio.wait(self._asking)

    async def _reply(self, ask: Ask) -> Told:
        point, num_known = self._known(ask)
        session = point.take()
        is_recorded = False
        try:
            reply = await session.ask(_named(ask.messages)[num_known:], tools=ask.tools)
            is_recorded = True
        except PromptTooLongError as error:
            self.too_long = error
            raise Refusal(400, str(error), param="messages", code="context_length_exceeded") from error
        except EnvError as error:  # messages that cannot be rendered are the agent's mistake, which it may mend
            raise Refusal(400, str(error), param="messages") from error
        except Exception as error:
            self._fail(error)
            what = str(error) if isinstance(error, JaxrlError) else f"{type(error).__name__}: {error}"
            raise Refusal(500, f"the policy failed, and with it this rollout: {what}", code="policy_failed") from error
        finally:
            if not is_recorded:
                point.session = session  # at rest where it was
        self.too_long = None
        self._num_tokens += reply.num_tokens
        told = _told(reply, ask)
        self.told.append(told.message)
        self._points[ask.heard.with_reply(told.message).keys[-1]] = _Point(session)
        return told

    def _known(self, ask: Ask) -> tuple[_Point, int]:
        """Return the longest conversation that a request goes on from, and how many of its messages that has."""
        num_known = ask.heard.longest_beginning(self._points)
        return (self._points[ask.heard.keys[num_known]] if num_known else self._start), num_known

    def _refuse(self) -> None:
        """Refuse a request where nothing more is to be said."""
        if self._is_over:
            raise over()
        if self.failure is not None:
            raise Refusal(409, f"this rollout has failed: {self.failure}", code="rollout_failed")
        self.limit = self.limit or self._budget.reached(
            num_turns=len(self.told) + len(self._asking), num_tokens=self._num_tokens, duration_s=self._clock() - self._started_s
        )
        if self.limit is not None:
            raise Refusal(400, f"this rollout has used up its budget: `{self.limit}` of the environment's `budget`", code=self.limit)
        if len(self._asking) >= MAX_PARALLEL:
            raise Refusal(429, f"{MAX_PARALLEL} requests of this rollout wait for replies; send the next when one of them is there")

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.failed.set()


def _named(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which each result of a tool says which tool it is of, as OpenAI's messages do not."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    return [message | {"name": names[call_id]} if (call_id := message.get("tool_call_id")) in names else message for message in messages]


def _told(reply: Reply, ask: Ask) -> Told:
    parsed = ParsedReply(reply.content, reply.reasoning, reply.tool_calls)
    teller = ReplyTeller(lambda _: parsed, takes_calls=ask.takes_calls, is_parallel=ask.is_parallel)
    delta = teller.end()
    finish_reason = finish_word("stop" if reply.is_stopped else "length", teller.num_calls)
    return Told(teller.message, delta, finish_reason, reply.num_prompt_tokens, reply.num_tokens)
