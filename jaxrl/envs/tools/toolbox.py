"""Answers the calls of replies: which tool, whether the arguments fit, how long it may take, what the policy is told.

In: calls as they were parsed. Out: one `tool` message for each, and counts. What the policy did wrong (a malformed call, an unknown tool,
arguments that do not fit, a tool that raised) is told to it; what a tool did wrong ends the rollout, or is told, as `on_failure` says.
A malformed call is never run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jaxrl.envs.base import Message, ToolSchema
from jaxrl.envs.grading.worker import MAX_TEXT_CHARS
from jaxrl.envs.tools.arguments import misfit
from jaxrl.envs.tools.tool import Tool, ToolError, ToolFailedError
from jaxrl.types import ToolCall

CALLS, MALFORMED, UNKNOWN, ERRORS, TIMEOUTS, DURATION = (
    f"tools/{name}" for name in ("calls", "malformed", "unknown", "errors", "timeouts", "duration_s")
)


class Toolbox:
    """The tools of one environment.

    Args:
      where: the environment, for messages.
      tools: what can be called; names are unique.
      max_result_chars: a longer result is cut, with a note.
      on_failure: `end` raises what a tool did wrong, `answer` tells the policy.
      clock: seconds, for measuring.
    """

    def __init__(
        self,
        where: str,
        tools: Sequence[Tool],
        *,
        max_result_chars: int = 4000,
        on_failure: Literal["end", "answer"] = "end",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._where = where
        self._tools = {tool.name: tool for tool in tools}
        self._max_result_chars = max_result_chars
        self._on_failure = on_failure
        self._clock = clock

    @property
    def schemas(self) -> list[ToolSchema]:
        """What the policy is told of the tools."""
        return [tool.schema for tool in self._tools.values()]

    def empty_counts(self) -> dict[str, float]:
        """Return the metrics of a rollout that has called nothing."""
        return dict.fromkeys((CALLS, MALFORMED, UNKNOWN, ERRORS, TIMEOUTS, DURATION), 0.0)

    async def answer(self, call: ToolCall, counts: dict[str, float]) -> Message:
        """Return the message that answers a call.

        Args:
          call: the call, which may be malformed.
          counts: metrics of the rollout, which are added to.

        Raises:
          ToolFailedError: the tool hung, died or returned something absurd, and that ends rollouts.
        """
        counts[CALLS] += 1
        tool = self._tools.get(call.name)
        if call.arguments is None:
            counts[MALFORMED] += 1
            content = f"error: {call.error}"
        elif tool is None:
            counts[UNKNOWN] += 1
            content = f"error: no such tool; there are {', '.join(self._tools)}"
        elif words := misfit(call.arguments, tool.parameters):
            counts[ERRORS] += 1
            content = f"error: {words}"
        else:
            content = await self._result(tool, call.arguments, counts)
        # A name that the policy made up may be anything, and templates write names as they are.
        named = {"name": call.name} if tool else {}
        return {"role": "tool", "tool_call_id": call.id, **named, "content": content}

    def close(self) -> None:
        """Give back what the tools hold."""
        for tool in self._tools.values():
            tool.close()

    async def _result(self, tool: Tool, arguments: dict[str, Any], counts: dict[str, float]) -> str:
        began_s = self._clock()
        try:
            return self._cut(await self._called(tool, arguments))
        except ToolFailedError as error:
            counts[ERRORS] += 1
            counts[TIMEOUTS] += error.is_late
            if self._on_failure == "end":
                raise
            return f"error: {error.told}"
        except Exception as error:  # a tool is anybody's: whatever it raises is an answer to its call
            counts[ERRORS] += 1
            words = str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}"
            return self._cut(f"error: {words}")
        finally:
            counts[DURATION] += self._clock() - began_s

    async def _called(self, tool: Tool, arguments: dict[str, Any]) -> str:
        where = f"{self._where}: tool {tool.name!r}"
        try:
            async with asyncio.timeout(tool.deadline_s) as deadline:
                result = await tool.call(arguments)
        except TimeoutError:
            if not deadline.expired():
                raise
            late = f"not done after {tool.deadline_s:g} s"
            raise ToolFailedError(f"{where} was {late}", told=late, is_late=True) from None
        if not isinstance(result, str):
            raise ToolFailedError(f"{where} returned {type(result).__name__}, expected a text", told="the tool failed")
        if len(result) > MAX_TEXT_CHARS:
            raise ToolFailedError(f"{where} returned {len(result)} characters; at most {MAX_TEXT_CHARS} are read", told="the tool failed")
        return result

    def _cut(self, result: str) -> str:
        missing = len(result) - self._max_result_chars
        return result if missing <= 0 else f"{result[: self._max_result_chars]} [{missing} more characters]"
