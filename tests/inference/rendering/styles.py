"""The committed tokenizers and chat templates of `tests/golden/templates`, and what transformers makes of a conversation with them.

What transformers says is the independent half of every comparison: it renders and encodes a whole conversation at once, and knows
nothing of turns, sampled ids or branches.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from jaxrl.inference.rendering import Renderer
from tests.golden.make_templates import DIRECTORY
from tests.golden.make_templates import STYLES as MADE

STYLES = tuple(MADE)
PINNED = "01 Jan 2025"
"""The day that a template is told instead of today."""

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]},
    },
}
"""The schema of a tool."""


@functools.cache
def renderer_of(style: str) -> Renderer:
    """Return the renderer of a style, loaded once."""
    return Renderer.from_pretrained(DIRECTORY / style)


@functools.cache
def tokenizer_of(style: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a style as transformers loads it, which shares nothing with the renderer."""
    return PreTrainedTokenizerFast.from_pretrained(DIRECTORY / style)


def their_text(style: str, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = (), asks: bool = True) -> str:
    """Return the text of a whole conversation, with a generation prompt if it `asks`."""
    return tokenizer_of(style).apply_chat_template(
        list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=asks, date_string=PINNED
    )


def their_ids(style: str, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = (), asks: bool = True) -> list[int]:
    """Return the ids of a whole conversation, with a generation prompt if it `asks`."""
    return tokenizer_of(style).apply_chat_template(
        list(messages), tools=list(tools) or None, tokenize=True, add_generation_prompt=asks, date_string=PINNED
    )["input_ids"]


def call_of(name: str, arguments: Any, call_id: str = "call00001") -> dict[str, Any]:
    """Return a call of a tool as OpenAI's API has it, with the arguments as an object, as templates want them."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def user(content: Any) -> dict[str, Any]:
    """Return a question."""
    return {"role": "user", "content": content}


def assistant(content: str = "", *, thought: str = "", calls: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return a reply, as templates are shown replies that were taken apart."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return message | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": list(calls)} if calls else {})


def result(content: str, call_id: str = "call00001", name: str = "add") -> dict[str, Any]:
    """Return what a tool answers."""
    return {"role": "tool", "content": content, "tool_call_id": call_id, "name": name}


def ids_of(renderer: Renderer, text: str) -> np.ndarray:
    """Return the ids of a text in which special tokens are tokens."""
    return renderer.encode(text, add_special_tokens=False)
