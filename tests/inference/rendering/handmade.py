"""Small chat templates over the golden tokenizer, each with one habit of a well-known family, and short ways to talk through them."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.turns import RenderedTurn, RenderState

GOLDEN = Path(__file__).parents[2] / "golden" / "tokenizer"
ENDOFTEXT, IM_START, IM_END, THINK, END_THINK = 0, 1, 2, 3, 4
CHATML = json.loads((GOLDEN / "tokenizer_config.json").read_text())["chat_template"]
BOS = "{{ bos_token }}" + CHATML
STRIPS_THINKING = CHATML.replace(
    "message['content']", "(message['content'].split('</think>')[-1] if not loop.last else message['content'])"
)
"""Like the templates of thinking models: the thinking of earlier turns is not shown again."""
TRIMS = CHATML.replace("message['content']", "message['content'] | trim")
NO_THINKING = CHATML.replace("assistant\\n' }}{% endif", "assistant\\n<think></think>' }}{% endif")
"""A generation prompt that holds more than the history will."""
WRITES_TOOLS = "{% if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}" + CHATML

CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + {\"name\": c.function.name, \"arguments\": c.function.arguments} | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Writes calls of tools beside text, in the Hermes format."""

TAKES_TURNS = (
    "{% set turns = namespace(asks=true) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != turns.asks %}{{ raise_exception('roles must take turns') }}{% endif %}"
    "{% set turns.asks = not turns.asks %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>' + m.content + '\n' }}"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}"
    "{{ '<tool_call>' + {\"name\": c.function.name, \"arguments\": c.function.arguments} | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>' }}"
    "{% elif m.role == 'assistant' %}{{ m.content | trim + '<|im_end|>' }}"
    "{% else %}{{ '<tool_response>' + m.content + '</tool_response>' }}{% endif %}{% endfor %}"
)
"""Questions and replies alternate strictly, but for replies that call tools: like Mistral's."""

GROUPS_RESULTS = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '' if loop.previtem and loop.previtem.role == 'tool' else '<|im_start|>user\\n' }}"
    "{{ '<tool_response>' + m.content + '</tool_response>' }}"
    "{{ '' if loop.nextitem and loop.nextitem.role == 'tool' else '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Results of parallel calls share one turn of the user: like Qwen's."""

NEEDS_CALLS = CALLS.replace(
    "{% for m in messages %}", "{% for m in messages %}{% if m.role != 'tool' or loop.previtem.tool_calls %}", 1
).replace("{{ '<|im_end|>\\n' }}{% endfor %}", "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}", 1)
"""Writes results only behind calls that it was told of, and else leaves them out."""

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}}}
CALL_TEXT = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@functools.cache
def golden() -> Renderer:
    """The golden tokenizer with its own template."""
    return Renderer.from_pretrained(GOLDEN)


@functools.cache
def with_template(template: str) -> Renderer:
    """The golden tokenizer with another template."""
    return Renderer(golden().tokenizer, template, golden().stop_ids)


def ids_of(text: str) -> np.ndarray:
    """The golden tokenizer's ids of a text in which special tokens are tokens."""
    return golden().encode(text, add_special_tokens=False)


def user(text: Any) -> dict[str, Any]:
    """A question."""
    return {"role": "user", "content": text}


def result(text: str, call_id: str = "call_0_0") -> dict[str, Any]:
    """What a tool answers."""
    return {"role": "tool", "content": text, "tool_call_id": call_id, "name": "add"}


def assistant(text: str | None, *arguments: Any) -> dict[str, Any]:
    """A reply that the environment made up, with one call of `add` for each of the arguments."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    calls = [
        {"id": f"call_0_{index}", "type": "function", "function": {"name": "add", "arguments": one}} for index, one in enumerate(arguments)
    ]
    return {**message, "tool_calls": calls} if calls else message


def after(renderer: Renderer, turn: RenderedTurn, reply: str | Sequence[int], stop: Sequence[int] = (IM_END,)) -> RenderState:
    """The conversation after a reply, by default one that the template's own stop id ended."""
    said = ids_of(reply) if isinstance(reply, str) else np.asarray(reply, np.int32)
    return renderer.close_turn(turn, np.concatenate([said, np.asarray(stop, np.int32)]).astype(np.int32))


def added(turn: RenderedTurn, state: RenderState) -> str:
    """The text of what a turn adds to a conversation; the ids must be those, and the ones before must be the ones that were seen."""
    assert not turn.is_fork
    np.testing.assert_array_equal(turn.prompt_ids[: len(state.token_ids)], state.token_ids)
    new = turn.prompt_ids[len(state.token_ids) :]
    np.testing.assert_array_equal(np.concatenate([*turn.spans, turn.generation_prompt]), new)
    text = golden().decode(new)
    np.testing.assert_array_equal(new, ids_of(text))
    assert turn.text == state.text + state.stop_text + text
    return text


def bodies(turn: RenderedTurn) -> list[str | None]:
    """The text of each new message's own tokens; None where they are not known."""
    pairs = zip(turn.spans, turn.content_masks, strict=True)
    return [None if mask is None else golden().decode(span[mask]) for span, mask in pairs]
