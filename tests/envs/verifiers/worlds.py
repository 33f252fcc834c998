"""A world that is played like one of verifiers: an episode is a coroutine of the test's, which asks over HTTP under the id of its trace."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from jaxrl.envs.verifiers.verdicts import Verdict

Ask = Callable[[list[dict[str, Any]]], Awaitable[str]]
"""Messages -> what the policy replies; they are extended by it. Raises an `httpx.HTTPStatusError` if it does not."""
Episode = Callable[[int, Callable[[], Ask]], Awaitable[Verdict]]
"""(index of the task, what begins a trace) -> what it came to."""


class ToyWorld:
    """A world of three tasks."""

    def __init__(self, episode: Episode, *, num_failing_starts: int = 0) -> None:
        self._episode = episode
        self._num_failing_starts = num_failing_starts
        self._numbers = itertools.count()
        self.specs: list[dict[str, Any]] = [{"id": f"t{index}", "index": index, "data": {}} for index in range(3)]
        self.events: list[str] = []
        """What became of what its episodes share, in order."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Hold nothing, and note when."""
        self.events.append("start")
        if self.events.count("start") <= self._num_failing_starts:
            raise OSError("no port is free")
        try:
            yield
        finally:
            self.events.append("stop")

    async def play(self, index: int, base_url: str, headers: dict[str, str], minted: Callable[[str], None]) -> Verdict:
        """Play the test's episode."""
        async with httpx.AsyncClient(verify=False, trust_env=False) as client:

            def begin() -> Ask:
                trace_id = f"trace-{next(self._numbers)}"
                minted(trace_id)

                async def ask(messages: list[dict[str, Any]]) -> str:
                    reply = await client.post(
                        f"{base_url}/chat/completions",
                        json={"model": "policy", "messages": messages},
                        headers={**headers, "X-Session-ID": trace_id, "Authorization": "Bearer EMPTY"},
                    )
                    reply.raise_for_status()
                    messages.append(reply.json()["choices"][0]["message"])
                    return messages[-1]["content"]

                return ask

            return await self._episode(index, begin)


def scored(*replies: str, reward: float | None = 1.0, **more: Any) -> Verdict:
    """Return the verdict on an episode of these replies that went well."""
    return Verdict(
        **{"rewards": {"right": reward}, "stop_condition": "agent_completed", "num_replies": len(replies), "replies": replies} | more
    )


def user(text: str) -> dict[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": text}
