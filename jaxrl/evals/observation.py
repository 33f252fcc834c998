"""What the policy was shown first, and one number for it: by this an environment that ignores its seed or its index is found out.

In: a session, or the messages of a first question. Out: the same session, watched, and hashes. Nothing is asked here.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.envs.base import Message, Reply, Session, ToolSchema
from jaxrl.evals.plan import canonical_json, sha_of
from jaxrl.types import Rollout

VOLATILE_KEYS = frozenset({"episode_id"})
"""Keys of JSON in messages that may differ between two plays of one task, because they name the play."""


@dataclass(slots=True)
class FirstObservation:
    """What a rollout's first question was, once there was one."""

    shown: dict[str, Any] | None = None
    """`messages`, and `tools` if there were any."""

    def note(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> None:
        """Keep a question if it is the first one."""
        if self.shown is None:
            # As it was when it was asked: an environment may go on writing into its lists.
            self.shown = copy.deepcopy({"messages": [dict(message) for message in messages]} | ({"tools": list(tools)} if tools else {}))


class WatchedSession:
    """A session that notes what is asked first, and is otherwise the one inside.

    Args:
      session: whose conversations these are.
      first: where the first question is kept, the same for all conversations of a rollout.
    """

    def __init__(self, session: Session, first: FirstObservation) -> None:
        self._session = session
        self._first = first

    async def ask(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] = ()) -> Reply:
        """See `Session.ask`."""
        self._first.note(messages, tools)
        return await self._session.ask(messages, tools=tools)

    def fork(self) -> WatchedSession:
        """See `Session.fork`."""
        return WatchedSession(self._session.fork(), self._first)

    def restart(self) -> WatchedSession:
        """See `Session.restart`."""
        return WatchedSession(self._session.restart(), self._first)

    def __getattr__(self, name: str) -> Any:
        """Return what else the session inside offers, to an environment that talks to it in its own way."""
        return getattr(self._session, name)


def observation_text(shown: Mapping[str, Any], volatile_keys: frozenset[str] = VOLATILE_KEYS) -> str:
    """Return the canonical JSON of a first question, without what may differ between two plays of it.

    Example:
      >>> observation_text({"messages": [{"role": "user", "content": '{"episode_id": "7f", "q": 1}'}]})
      '{"messages":[{"content":{"q":1},"role":"user"}]}'
    """
    return canonical_json(_without(shown, volatile_keys))


def observation_sha(shown: Mapping[str, Any] | None, rollout: Rollout, volatile_keys: frozenset[str] = VOLATILE_KEYS) -> str | None:
    """Return the hash of what the policy was shown first; None if it was shown nothing.

    Args:
      shown: the first question, if the session was asked one; else it is told from what the rollout recorded.
      rollout: the attempt.
      volatile_keys: keys that do not count where a message is JSON.
    """
    if shown is None:
        before = _before_first_reply(rollout)
        if not before:
            return None
        shown = {"messages": [{"role": rollout.nodes[i].role, "content": rollout.nodes[i].content} for i in before]}
    return hashlib.sha256(observation_text(shown, volatile_keys).encode()).hexdigest()[:16]


def prompt_sha(rollout: Rollout) -> str | None:
    """Return the hash of the first prompt as the policy read it; None if it never replied.

    Of its token ids, the chat template's own included, which gives away a template that writes the date; of its messages where nobody
    knows the ids.
    """
    first = next((index for index, node in enumerate(rollout.nodes) if node.sampled), None)
    if first is None:
        return None
    nodes = [rollout.nodes[index] for index in rollout.path_to(first)]
    reply = nodes[-1]
    token_ids = np.concatenate([*(n.token_ids for n in nodes[:-1]), reply.token_ids[: len(reply.token_ids) - reply.num_sampled]])
    if len(token_ids):
        return hashlib.sha256(token_ids.astype("<i4").tobytes()).hexdigest()[:16]
    return sha_of([[node.role, node.content] for node in nodes[:-1]])


def _before_first_reply(rollout: Rollout) -> tuple[int, ...]:
    first = next((index for index, node in enumerate(rollout.nodes) if node.sampled), None)
    return () if first is None else rollout.path_to(first)[:-1]


def _without(value: Any, volatile_keys: frozenset[str]) -> Any:
    """Return a JSON value without some keys, at any depth, in texts that are JSON objects or lists too."""
    if isinstance(value, Mapping):
        return {key: _without(part, volatile_keys) for key, part in value.items() if key not in volatile_keys}
    if isinstance(value, list | tuple):
        return [_without(part, volatile_keys) for part in value]
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return _without(json.loads(value), volatile_keys)
        except (ValueError, RecursionError):
            return value
    return value
