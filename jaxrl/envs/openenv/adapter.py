"""Between an environment's own words and the policy's: what an observation says, and what action a reply is.

In: the observations of a server, the replies of a policy. Out: messages, and the fields of actions. A user may give an object of their own.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from jaxrl.blame import in_words
from jaxrl.config.env import OpenEnvConfig
from jaxrl.envs.base import Message, Reply, TaskSpec
from jaxrl.envs.hooks import imported
from jaxrl.errors import ConfigError, EnvError

Said = str | Sequence[Message]


class Adapter(Protocol):
    """Tells an environment and the policy of each other. Its methods may be coroutine functions."""

    def message(self, observation: dict[str, Any], spec: TaskSpec) -> Said | Awaitable[Said]:
        """Return what the policy is told: messages, or a text, which is one message of the user."""
        ...

    def action(self, reply: Reply, spec: TaskSpec) -> Mapping[str, Any] | Awaitable[Mapping[str, Any]]:
        """Return the fields of the action that a reply is."""
        ...


class TemplateAdapter:
    """Shows one field of the observation, or all of them as JSON, and puts the reply into a template.

    Args:
      question_key: the field; an empty text takes all.
      action: the fields of an action; `{reply}` in a text of it stands for the reply, without what it set apart as thinking.
    """

    def __init__(self, question_key: str, action: Mapping[str, Any]) -> None:
        self._question_key = question_key
        self._action = action

    async def message(self, observation: dict[str, Any], spec: TaskSpec) -> str:
        """See `Adapter.message`."""
        del spec
        if not self._question_key:
            return json.dumps(observation, ensure_ascii=False)
        text = observation.get(self._question_key)
        if not isinstance(text, str):
            kind = f"is a {type(text).__name__}" if self._question_key in observation else "is not there"
            keys = ", ".join(observation) or "none"
            raise EnvError(
                f"`question_key`={self._question_key!r} must be a text in every observation, and it {kind}; the observation has the "
                f"fields: {keys}. Name one of them, or set `question_key` to '' to show all"
            )
        return text

    async def action(self, reply: Reply, spec: TaskSpec) -> Mapping[str, Any]:
        """See `Adapter.action`."""
        del spec
        return filled(self._action, reply.content.strip())


def filled(template: Any, reply: str) -> Any:
    """Return a template with the reply in place of each `{reply}`.

    Example:
      >>> filled({"tool": "say", "arguments": {"text": "I say {reply}"}, "n": 1}, "11")
      {'tool': 'say', 'arguments': {'text': 'I say 11'}, 'n': 1}
    """
    match template:
        case str():
            return template.replace("{reply}", reply)
        case Mapping():
            return {key: filled(value, reply) for key, value in template.items()}
        case list():
            return [filled(value, reply) for value in template]
    return template


def build_adapter(config: OpenEnvConfig, where: str) -> Adapter:
    """Return the adapter that a config describes.

    Args:
      config: names an object of the user's, or says what to show and to fill in.
      where: the environment, for messages.

    Raises:
      ConfigError: the user's object cannot be imported or made, or has not both methods.
    """
    if config.import_path is None:
        return TemplateAdapter(config.question_key, config.action)
    setting = f"{where}: `import_path`={config.import_path!r}"
    make = imported(config.import_path, setting)
    try:
        adapter = make()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{setting} was called without arguments and raised {in_words(error)}") from error
    missing = [method for method in ("message", "action") if not callable(getattr(adapter, method, None))]
    if missing:
        raise ConfigError(
            f"{setting} returned a {type(adapter).__name__} without a method `{missing[0]}`; see `jaxrl.envs.openenv.adapter.Adapter`"
        )
    return adapter
