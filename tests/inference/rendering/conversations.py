"""Conversations that are played over every style, and what a policy would write in them: the reply as its template has it.

A step is what the environment says, and then the policy's reply as a message that was taken apart.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl.inference.rendering import Renderer
from jaxrl.inference.rendering.turns import RenderedTurn, RenderState
from jaxrl.types import ToolCall
from tests.inference.rendering.styles import ADD, assistant, call_of, ids_of, renderer_of, result, their_text, user

Message = dict[str, Any]
Step = tuple[list[Message], Message]

SYSTEM = {"role": "system", "content": "Be brief."}
ODD = {"a": True, "b": None, "c": [1.5, {"d": False}], "e": 'é "\n'}


def parts(*texts: str) -> list[dict[str, str]]:
    """Return content as a list of text parts."""
    return [{"type": "text", "text": text} for text in texts]


SCRIPTS: dict[str, tuple[Step, ...]] = {
    "questions": (([user("1+1?")], assistant("2")), ([user("Sure?")], assistant("3")), ([user("Ok.")], assistant("4"))),
    "system": (([SYSTEM, user("1+1?")], assistant("2")), ([user("Sure?")], assistant("3")), ([user("Ok.")], assistant("4"))),
    "thinking": (
        ([user("1+1?")], assistant("2", thought="one and one")),
        ([user("Sure?")], assistant("3", thought="quite")),
        ([user("Ok.")], assistant("4")),
    ),
    "list content": (([user(parts("1+", "1?"))], assistant("2")), ([user(parts("Sure?"))], assistant("3"))),
    "assistant last": (([user("1+1?"), assistant("5")], assistant("2")), ([user("Sure?"), assistant("6")], assistant("3"))),
    "example": (([user("1+1?"), assistant("2"), user("1+2?")], assistant("3")), ([user("Sure?")], assistant("4"))),
    "empty": (([user("")], assistant("")), ([user("")], assistant("2"))),
    "tools": (
        ([user("1+1?")], assistant(calls=[call_of("add", {"a": 1, "b": 1})])),
        ([result("2")], assistant(calls=[call_of("add", ODD)])),
        ([result("no")], assistant("2")),
        ([user("Sure?")], assistant("3")),
    ),
    "parallel": (
        ([user("1+1, 2+2?")], assistant(calls=[call_of("add", {"a": 1, "b": 1}), call_of("add", ODD)])),
        ([result("2"), result("4")], assistant("2, 4")),
        ([user("Sure?")], assistant("3")),
    ),
    "thinking tools": (
        ([user("1+1?")], assistant(thought="ask", calls=[call_of("add", ODD)])),
        ([result("2")], assistant("2", thought="so it is")),
        ([user("Sure?")], assistant("3")),
    ),
}
TOOL_SCRIPTS = ("tools", "parallel", "thinking tools")


@dataclass(frozen=True)
class Played:
    """One turn of a conversation that was played."""

    turn: RenderedTurn
    state: RenderState
    sampled: np.ndarray
    told: list[Message]
    """The conversation before the reply, with replies taken apart, as an OpenAI client has it; parts of a text are joined."""
    plain: list[Message]
    """The same with each reply as one text."""


@functools.cache
def play(style: str, script: str, history: str = "template") -> tuple[Played, ...]:
    """Play a conversation of `SCRIPTS` in which the policy writes each reply as its template has it."""
    renderer, state, tools = renderer_of(style), None, tools_of(script)
    told: list[Message] = []
    plain: list[Message] = []
    played: list[Played] = []
    for number, (said, reply) in enumerate(SCRIPTS[script]):
        said = answering(said, state.reply.tool_calls if state else ())
        joined = [{**message, "content": joined_parts(message["content"])} for message in said]
        told, plain = [*told, *joined], [*plain, *joined]
        turn = renderer.open_turn(state, said, tools=tools, history=history)
        reply = with_ids(renderer, reply, number)
        text = as_written(style, told, reply, tools)
        sampled = np.append(ids_of(renderer, text), renderer.turn_end_id).astype(np.int32)
        state = renderer.close_turn(turn, sampled)
        played.append(Played(turn, state, sampled, told, plain))
        told, plain = [*told, reply], [*plain, {"role": "assistant", "content": text}]
    return tuple(played)


def joined_parts(content: Any) -> Any:
    """Return content as one text."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def answering(said: Sequence[Message], calls: Sequence[ToolCall]) -> list[Message]:
    """Return what an environment says, the results of tools under the ids of the calls that they answer."""
    ids = [call.id for call in calls]
    return [{**message, "tool_call_id": ids.pop(0)} if message["role"] == "tool" and ids else message for message in said]


def with_ids(renderer: Renderer, reply: Message, turn: int) -> Message:
    """Return a reply whose calls have the ids that the parser will give them."""
    if "tool_calls" not in reply:
        return reply
    call_id = renderer.parser.format.call_id
    return {**reply, "tool_calls": [{**call, "id": call_id(turn, index)} for index, call in enumerate(reply["tool_calls"])]}


def as_written(style: str, told: Sequence[Message], reply: Message, tools: Sequence[Any]) -> str:
    """Return the text of a reply as the style's template writes it, up to its stop, as transformers renders it."""
    calls, thought = reply.get("tool_calls", []), reply.get("reasoning_content", "")
    if len(calls) > 1 and style == "llama3":  # its template writes one call only, its model separates several
        return "; ".join(as_written(style, told, {**reply, "tool_calls": [call]}, tools) for call in calls)
    after = [] if calls or thought else [user("?")]  # a last reply without thinking may be shown with an empty block of it
    try:
        asked = their_text(style, told, tools=tools)
        whole = their_text(style, [*told, reply, *after], tools=tools, asks=bool(after))
    except Exception:  # the template refuses it; the policy writes what it likes
        asked, whole = "", f"{reply['content']}"
    rest = whole[len(asked) :] if whole.startswith(asked) else reply["content"]
    ends = [rest.find(stop) for stop in map(renderer_of(style).token_text, renderer_of(style).stop_ids) if stop in rest]
    text = rest[: rest.find(reply["content"]) + len(reply["content"])] if after else rest[: min(ends)] if ends else rest
    if thought in text:
        return text
    said = text.lstrip(" ")
    return f"{text[: len(text) - len(said)]}<think>{thought}</think>{said}"


def tools_of(script: str) -> list[Any]:
    """Return the tools of a conversation."""
    return [ADD] if script in TOOL_SCRIPTS else []
