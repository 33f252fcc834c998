"""Which format of tool calls a model has: the one that reads back what its own chat template writes.

In: a tokenizer, a way to render messages, the setting `model.tool_format`. Out: a `CallParser` that says why it is this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxrl.config.model import ToolFormat
from jaxrl.inference.rendering.tool_calls.base import CallFormat
from jaxrl.inference.rendering.tool_calls.hermes import Hermes
from jaxrl.inference.rendering.tool_calls.json_text import excerpt
from jaxrl.inference.rendering.tool_calls.llama3 import Llama3
from jaxrl.inference.rendering.tool_calls.mistral import Mistral
from jaxrl.inference.rendering.tool_calls.parser import END_THINK, THINK, CallParser
from jaxrl.inference.rendering.tool_calls.xml import Xml

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FORMATS: Mapping[str, CallFormat] = {one.name: one for one in (Hermes(), Llama3(), Mistral(), Xml())}
"""By name."""

_PROBE = "jaxrl_probe"
_ARGUMENTS = {"text": "a b", "count": 3}
_USER = {"role": "user", "content": "hello"}
_CALLING = {
    "role": "assistant",
    "content": "",
    # Mistral's templates take nothing but nine letters and digits.
    "tool_calls": [{"id": "000000000", "type": "function", "function": {"name": _PROBE, "arguments": _ARGUMENTS}}],
}


class Render(Protocol):
    """Writes messages with a chat template."""

    def __call__(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        """Return the text of messages; whatever it raises means that the template refuses them."""
        ...


def find_parser(tokenizer: Tokenizer, render: Render, tool_format: ToolFormat = "auto") -> CallParser:
    """Return the parser of a model's replies.

    A call whose arguments are known is rendered with the chat template; the format that reads exactly this call back is the model's. A
    template that cannot write calls gets `hermes`.

    Args:
      tokenizer: the policy's.
      render: its chat template.
      tool_format: a format that is known to be right, or `auto`.
    """
    opens = _opens_thinking(render)
    if tool_format != "auto":
        return CallParser(tokenizer, FORMATS[tool_format], thinks_at_once=opens, why="`model.tool_format` says so")
    written = _written_call(render)
    if written is None:
        return CallParser(tokenizer, FORMATS["hermes"], thinks_at_once=opens, why="the chat template cannot write calls")
    text, is_inside = written
    token_ids = np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
    for call_format in FORMATS.values():
        probed = CallParser(tokenizer, call_format, thinks_at_once=opens and is_inside).parse(token_ids, turn=0).tool_calls
        if [(call.name, call.arguments) for call in probed] == [(_PROBE, _ARGUMENTS)]:
            why = "it reads what the chat template writes"
            return CallParser(tokenizer, call_format, thinks_at_once=opens, why=why, is_proven=True)
    why = f"no known format reads what the chat template writes, {excerpt(text.strip(), length=80)}"
    return CallParser(tokenizer, FORMATS["hermes"], thinks_at_once=opens, why=why)


def _opens_thinking(render: Render) -> bool:
    """Say whether a reply begins inside of `<think>`, because the generation prompt opens it."""
    try:
        text = render([_USER], add_generation_prompt=True)
    except Exception:  # a template may refuse anything, in whatever way
        return False
    prompt = text[text.rfind(_USER["content"]) + len(_USER["content"]) :]
    return prompt.rfind(THINK) > prompt.rfind(END_THINK)


def _written_call(render: Render) -> tuple[str, bool] | None:
    """Return what the template writes for a reply with a call; None if it writes none.

    Returns:
      The text from where a reply begins, what ends the turn included; and whether it goes on from the generation prompt.
    """
    try:
        before = render([_USER], add_generation_prompt=True)
        plain = render([_USER, {"role": "assistant", "content": _PROBE}], add_generation_prompt=False)
        calling = render([_USER, _CALLING], add_generation_prompt=False)
    except Exception:  # as above
        return None
    if _PROBE not in calling:
        return None
    if calling.startswith(before):
        return calling[len(before) :], True
    header = plain[: plain.rfind(_PROBE)]
    start = len(header) if calling.startswith(header) else calling.find(_USER["content"]) + len(_USER["content"])
    return calling[start:], False
