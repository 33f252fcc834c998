"""What a server counts, in Prometheus' text format.

In: the engine's stats and the replies that were sent. Out: one text. It keeps no history and knows no HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from jaxrl.engine.engine import COUNTS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGES = {
    "running": "requests that are being decoded",
    "waiting": "requests that wait for a slot",
    "is_paused": "1 while decoding is held",
    "version": "policy version that is served",
}
"""The stats that go up and down; the others only grow."""
CHAT_TURNS = {
    "opened": "nothing was said before",
    "continued": "it goes on from the tokens of a reply that is remembered",
    "forked": "it begins with such a reply, and the chat template rewrites what was said",
    "unknown": "replies stand in it, and none of its beginnings is remembered",
}
"""What became of a chat's history."""


class RequestCounter:
    """Counts replies by route and status. Used from the event loop only."""

    def __init__(self) -> None:
        """Start at zero."""
        self._replies: Counter[tuple[str, int]] = Counter()

    def count(self, route: str, status: int) -> None:
        """Add one reply."""
        self._replies[route, status] += 1

    def exposition(self, stats: Mapping[str, float], chats: Mapping[str, int], num_sequences: int) -> str:
        """Return everything as text.

        Args:
          stats: `Engine.stats()`; empty before there is an engine.
          chats: `Chats.stats()`; empty before there is an engine.
          num_sequences: sequences that the server has let in and not answered.
        """
        lines: list[str] = []
        for name, value in stats.items():
            if name in GAUGES:
                lines += _metric(f"jaxrl_engine_{name}", "gauge", GAUGES[name], value)
            elif name in COUNTS:
                lines += _metric(f"jaxrl_engine_{name}_total", "counter", f"{name.replace('_', ' ')} since the start", value)
        lines += _metric("jaxrl_server_sequences", "gauge", "sequences let in and not answered yet", num_sequences)
        lines += _chat_metrics(chats)
        name = "jaxrl_server_replies_total"
        lines += [f"# HELP {name} replies by route and status", f"# TYPE {name} counter"]
        lines += [f'{name}{{route="{route}",status="{status}"}} {count}' for (route, status), count in sorted(self._replies.items())]
        return "\n".join(lines) + "\n"


def _chat_metrics(chats: Mapping[str, int]) -> list[str]:
    if not chats:
        return []
    lines = _metric("jaxrl_server_conversations", "gauge", "replies of chats that are remembered", chats["conversations"])
    lines += _metric("jaxrl_server_conversation_tokens", "gauge", "tokens of all of them", chats["tokens"])
    for name, meaning in (("remembered", "replies of chats that were remembered"), ("forgotten", "of those, gone to make room")):
        lines += _metric(f"jaxrl_server_conversations_{name}_total", "counter", meaning, chats.get(name, 0))
    name = "jaxrl_server_chat_turns_total"
    meanings = "; ".join(f"{what}: {meaning}" for what, meaning in CHAT_TURNS.items())
    lines += [f"# HELP {name} turns of chats by what became of their history ({meanings})", f"# TYPE {name} counter"]
    return lines + [f'{name}{{history="{what}"}} {chats.get(what, 0)}' for what in CHAT_TURNS]


def _metric(name: str, kind: str, meaning: str, value: float) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name} {value:.17g}"]
