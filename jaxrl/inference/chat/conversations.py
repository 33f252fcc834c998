"""Which tokens stand for a conversation that a client sends back as text.

An OpenAI client keeps its conversation in words and sends all of it with every request. Encoding these words anew would give other
tokens than were sampled, now and then. So whoever serves it remembers each reply's `RenderState` under the conversation as the client
knows it, and a request that begins with such a conversation goes on from those very ids. In: messages in the one spelling of
`chat.wire.read_messages`. Out: the longest conversation that is remembered. It renders nothing and knows no policy version: ids stay
what they are when weights change.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl.inference.chat.wire import canonical_arguments
from jaxrl.inference.rendering.turns import RenderState

CHARS_PER_TOKEN = 16
"""A conversation counts as a token per so many characters at least, whatever its template leaves out of the prompt."""

Key = bytes
"""The digest of a conversation."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A conversation as a client sent it."""

    keys: tuple[Key, ...]
    """Of the conversation before its first message, after it, ..., after the last."""
    num_chars: int
    """Characters of all that is in the keys."""

    def longest_beginning(self, known: Container[Key]) -> int:
        """Return how many messages the longest beginning has whose key is known; 0 if none is.

        The whole conversation is no beginning: at least one message is left to go on with.
        """
        return next((num_messages for num_messages in range(len(self.keys) - 2, 0, -1) if self.keys[num_messages] in known), 0)

    def with_reply(self, message: Mapping[str, Any]) -> Heard:
        """Return the conversation that the client has after a reply."""
        spelled = _spelled(message)
        return Heard((*self.keys, _digest(self.keys[-1], spelled)), self.num_chars + len(spelled))


def hear(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), salt: str = "") -> Heard:
    """Return the keys of a conversation and of all its beginnings.

    Two spellings of one conversation have one key: content that is null, missing or empty, arguments that were written out again, tools
    with their fields in another order. Thinking is left out, since few clients send it back.

    Args:
      messages: in the spelling of `chat.wire.read_messages`, or a reply as `chat.wire.reply_message` tells it.
      tools: what the model was shown with them.
      salt: conversations of different salts have nothing in common.
    """
    spelled = json.dumps([salt, *tools], sort_keys=True, ensure_ascii=True)
    heard = Heard((_digest(b"", spelled),), len(spelled))
    keys, num_chars = [*heard.keys], heard.num_chars
    for message in messages:
        spelled = _spelled(message)
        keys.append(_digest(keys[-1], spelled))
        num_chars += len(spelled)
    return Heard(tuple(keys), num_chars)


@dataclass(frozen=True, slots=True)
class _Entry:
    state: RenderState
    size_tokens: int


class ConversationMemory:
    """Remembers the newest conversations, one entry per reply. May be used from any thread.

    If two replies are told in the same words, the newer one is remembered in place of the other.

    Args:
      max_conversations: replies that are remembered at most; 0 remembers none.
      max_tokens: ids of all of them together, at most.
    """

    def __init__(self, max_conversations: int, max_tokens: int) -> None:
        self._max_conversations = max_conversations
        self._max_tokens = max_tokens
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._num_tokens = 0
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def recall(self, heard: Heard) -> tuple[RenderState | None, int]:
        """Return the longest beginning that is remembered and how many messages it has; None and 0 if there is none."""
        with self._lock:
            num_messages = heard.longest_beginning(self._entries)
            if not num_messages:
                return None, 0
            key = heard.keys[num_messages]
            self._entries.move_to_end(key)
            return self._entries[key].state, num_messages

    def remember(self, told: Heard, state: RenderState) -> None:
        """Keep a reply; the least recently used ones make room.

        Args:
          told: the conversation as the client has it, the reply included.
          state: its tokens.
        """
        entry = _Entry(state, max(len(state.token_ids), told.num_chars // CHARS_PER_TOKEN))
        if entry.size_tokens > self._max_tokens:
            return
        with self._lock:
            if (old := self._entries.pop(told.keys[-1], None)) is not None:
                self._num_tokens -= old.size_tokens
            self._entries[told.keys[-1]] = entry
            self._num_tokens += entry.size_tokens
            self._counts["remembered"] += 1
            while len(self._entries) > self._max_conversations or self._num_tokens > self._max_tokens:
                _, oldest = self._entries.popitem(last=False)
                self._num_tokens -= oldest.size_tokens
                self._counts["forgotten"] += 1

    def count(self, what: str) -> None:
        """Add one to a count of its user."""
        with self._lock:
            self._counts[what] += 1

    def stats(self) -> dict[str, int]:
        """Return how much is remembered, and what was counted since the start."""
        with self._lock:
            return {"conversations": len(self._entries), "tokens": self._num_tokens, **self._counts}


def _spelled(message: Mapping[str, Any]) -> str:
    calls = [
        [call["id"], call["function"]["name"], canonical_arguments(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    fields = [message["role"], message.get("content") or "", calls, message.get("tool_call_id") or "", message.get("name") or ""]
    return json.dumps(fields, ensure_ascii=True)


def _digest(before: Key, spelled: str) -> Key:
    return hashlib.blake2b(before + spelled.encode(), digest_size=32).digest()
