"""What can be told of a chat template before anything is played: conversations of every kind are rendered turn by turn and looked at.

In: a renderer, and what the run asks of its template. Out: problems that would spoil the run, remarks worth a line in its log, and facts.
It takes a fraction of a second, samples nothing and reads no file. What a template cannot do and the run does not need is a fact and no
problem.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl.errors import EnvError
from jaxrl.inference.rendering import Renderer

Messages = list[dict[str, Any]]

REPLY, THOUGHT = "It is five.", "<think>\nTwo and three.\n</think>\n\n"
QUESTIONS = ("What is 2 + 3?", "And one more?", "Thank you.")
SYSTEM: Messages = [{"role": "system", "content": "Be brief."}]
TOOL_NAME, RESULT = "add_up", "The sum is 5."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"numbers": {"type": "array"}}, "required": ["numbers"]},
    },
}
PLAIN_ARGUMENTS: dict[str, Any] = {"numbers": [2, 3]}
ODD_ARGUMENTS: dict[str, Any] = {"numbers": [], "is_exact": True, "unit": None}
"""What templates like to spell as Python does."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run asks of its chat template."""

    turns: bool = False
    """Some environment has conversations of several turns that follow the template."""
    system: bool = False
    """Some environment sends a system message."""
    tools: bool = False
    """Some environment offers tools."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found."""

    template_sha256: str
    """Hash of the chat template, in hexadecimal digits."""
    asks: str
    """What stands before a reply."""
    continued: tuple[str, ...]
    """Kinds of conversation in which each prompt begins with all that was seen and sampled before."""
    rewritten: Mapping[str, str]
    """Kinds of conversation that a later turn rewrites, and where it first does."""
    refused: Mapping[str, str]
    """Kinds of conversation that cannot be rendered, and why."""
    problems: tuple[str, ...]
    """What would spoil the run; empty if all is well."""
    remarks: tuple[str, ...]
    """What is worth knowing."""


def preflight(renderer: Renderer, needs: Needs | None = None) -> Preflight:
    r"""Look a chat template over.

    Args:
      renderer: the run's.
      needs: what the run asks of the template; None is questions of one turn.

    Example:
      >>> found = preflight(Renderer.from_pretrained("tests/golden/tokenizer"))
      >>> found.problems, found.asks, found.continued[:2]
      ((), '<|im_start|>assistant\n', ('user', 'system'))
    """
    needs = needs or Needs()
    found = _Findings()
    for conversation in CONVERSATIONS:
        _play(renderer, conversation, found)
    asks = _look_at_prompt(renderer, found)
    _look_at_ends(renderer, needs, found)
    _look_at_system(renderer, needs, found)
    _look_at_tools(renderer, needs, found)
    _look_at_history(needs, found)
    if "strftime_now" in renderer.chat_template:
        found.remarks.append(
            "the chat template writes today's date, which jaxrl holds at 01 Jan 2025 so that a run can be repeated; servers that render "
            "chats write the real one"
        )
    return Preflight(
        template_sha256=hashlib.sha256(renderer.chat_template.encode()).hexdigest(),
        asks=asks,
        continued=tuple(found.continued),
        rewritten=found.rewritten,
        refused=found.refused,
        problems=tuple(found.problems),
        remarks=tuple(found.remarks),
    )


@dataclass(slots=True)
class _Findings:
    continued: list[str] = field(default_factory=list)
    rewritten: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _says(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _calls(*arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a reply that calls the tool once with each of the arguments."""
    calls = [
        {"id": f"call0000{index}", "type": "function", "function": {"name": TOOL_NAME, "arguments": each}}
        for index, each in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _results(num: int) -> Messages:
    return [{"role": "tool", "tool_call_id": f"call0000{index}", "name": TOOL_NAME, "content": RESULT} for index in range(num)]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation to play."""

    kind: str
    """What is peculiar to it."""
    opening: Messages
    """What stands before the first reply."""
    turns: Sequence[tuple[dict[str, Any], Messages]]
    """Each reply, and what follows it."""
    thought: str = ""
    """Stands at the beginning of every reply."""
    tools: Sequence[dict[str, Any]] = ()
    """What the policy may call."""


_ASKED = [_user(QUESTIONS[0])]
_PLAIN_TURNS = [(_says(REPLY), [_user(text)]) for text in QUESTIONS[1:]]
CONVERSATIONS = (
    Conversation("user", _ASKED, _PLAIN_TURNS),
    Conversation("system", [*SYSTEM, *_ASKED], _PLAIN_TURNS),
    Conversation("thinking", _ASKED, _PLAIN_TURNS, thought=THOUGHT),
    Conversation(
        "list content",
        [_user([{"type": "text", "text": QUESTIONS[0]}])],
        [(_says(REPLY), [_user([{"type": "text", "text": text}])]) for text in QUESTIONS[1:]],
    ),
    Conversation(
        "assistant last", [*_ASKED, _says(REPLY)], [(_says(REPLY), [_user(text), _says(REPLY)]) for text in QUESTIONS[1:]]
    ),
    Conversation("tool", _ASKED, [(_calls(PLAIN_ARGUMENTS), _results(1)), (_calls(ODD_ARGUMENTS), _results(1))], tools=[TOOL]),
    Conversation("parallel tools", _ASKED, [(_calls(PLAIN_ARGUMENTS, ODD_ARGUMENTS), _results(2))], tools=[TOOL]),
    Conversation("tool and question", _ASKED, [(_calls(ODD_ARGUMENTS), _results(1)), *_PLAIN_TURNS[:1]], tools=[TOOL]),
    Conversation("tool with thinking", _ASKED, [(_calls(ODD_ARGUMENTS), _results(1))], thought=THOUGHT, tools=[TOOL]),
)
"""Every kind; the prompts end on a question, on the result of a tool and on a reply that the policy did not write."""


def _play(renderer: Renderer, conversation: Conversation, found: _Findings) -> None:
    """Play a conversation in which the policy calls tools as the template writes it, and note how it went."""
    kind, tools = conversation.kind, conversation.tools
    told = conversation.opening
    try:
        turn = renderer.open_turn(None, told, tools=tools)
        for reply, after in conversation.turns:
            written = REPLY
            if reply.get("tool_calls"):
                written = _written(renderer, told, reply, tools)
                reply = _says(REPLY) if written is None else reply
            reply_ids = renderer.encode(conversation.thought + (written or REPLY), add_special_tokens=False)
            state = renderer.close_turn(turn, np.append(reply_ids, renderer.turn_end_id).astype(np.int32))
            ids = [call.id for call in state.reply.tool_calls]
            answers = [m | {"tool_call_id": ids.pop(0)} if m["role"] == "tool" and ids else m for m in after]
            turn = renderer.open_turn(state, answers, tools=tools)
            if turn.is_fork:
                found.rewritten[kind] = _first_difference(state.text, turn.text)
                return
            told = [*told, reply, *after]
    except EnvError as error:
        found.refused[kind] = str(error)
        return
    found.continued.append(kind)


def _written(renderer: Renderer, told: Messages, reply: dict[str, Any], tools: Sequence[dict[str, Any]]) -> str | None:
    """Return a reply as the template writes it, which is how the model was taught to; None if it writes none of the kind."""
    asked = renderer.prompt_text(told, tools)
    try:
        text = renderer.decode(renderer.message_ids([*told, reply], tools))
    except EnvError:
        return None
    return _up_to_stop(renderer, text[len(asked) :]) if text.startswith(asked) else None


def _text_with(renderer: Renderer, messages: Messages, tools: Sequence[dict[str, Any]]) -> str | None:
    """Return a conversation as the template writes it; None if it refuses a reply of that kind."""
    try:
        return renderer.prompt_text(messages, tools)
    except EnvError:
        return None


def _up_to_stop(renderer: Renderer, text: str) -> str:
    """Return a text up to where a reply that it is would have stopped."""
    ends = [text.find(stop) for stop in map(renderer.token_text, renderer.stop_ids) if stop in text]
    return text[: min(ends)] if ends else text


def _first_difference(seen: str, told: str) -> str:
    same = next((i for i, (a, b) in enumerate(zip(seen, told, strict=False)) if a != b), min(len(seen), len(told)))
    return f"{seen[same : same + 20]!r} became {told[same : same + 20]!r}"


def _look_at_prompt(renderer: Renderer, found: _Findings) -> str:
    """A question begins with one BOS and asks for a reply once, however its text is given; return what it asks with."""
    try:
        question = renderer.open_turn(None, [_user(QUESTIONS[0])])
    except EnvError as error:
        found.problems.append(f"not even a question can be asked: {error}")
        return ""
    bos_id = renderer.tokenizer.bos_token_id
    first, second = question.prompt_ids[:2].tolist()
    if first == second and first in renderer.tokenizer.added_tokens_decoder:
        found.problems.append("a prompt begins with BOS twice, which the model has never seen: remove it from the chat template")
    elif bos_id is not None and first != bos_id and renderer.encode("a").tolist()[:1] == [bos_id]:
        found.remarks.append(
            "the tokenizer puts BOS before bare text and the chat template does not, so prompts begin without; if the model was tuned "
            "with it, add `{{ bos_token }}` at the start of the template"
        )
    asks = renderer.decode(question.generation_prompt)
    if asks and (question.text.endswith(asks + asks) or asks == 2 * asks[: len(asks) // 2]):
        found.problems.append(
            f"a prompt asks for a reply twice ({question.text[-2 * len(asks) :]!r}): the chat template writes it two times, or also when "
            "`add_generation_prompt` is false"
        )
    half = len(QUESTIONS[0]) // 2
    parts = [{"type": "text", "text": part} for part in (QUESTIONS[0][:half], QUESTIONS[0][half:])]
    if renderer.open_turn(None, [_user(parts)]).text != question.text:
        found.problems.append("a question in two parts of text does not read like the same text in one")
    return asks


def _look_at_ends(renderer: Renderer, needs: Needs, found: _Findings) -> None:
    """A reply ends in an id that stops it, the same when it is history."""
    end = renderer.token_text(renderer.turn_end_id)
    if renderer.turn_end_id not in renderer.stop_ids:
        found.problems.append(f"the chat template ends a reply with {end!r}, at which no reply would stop")
    try:
        told = renderer.open_turn(None, [_user(QUESTIONS[0]), _says(REPLY), _user(QUESTIONS[1])]).text
    except EnvError:
        return
    after = told.rpartition(REPLY)[2].lstrip()
    if needs.turns and not after.startswith(end):
        found.remarks.append(
            f"the last reply of a conversation ends with {end!r} and an earlier one with {_first_token(renderer, after)!r}: "
            "where another message follows a reply, both stand"
        )


def _first_token(renderer: Renderer, text: str) -> str:
    return renderer.decode(renderer.encode(text, add_special_tokens=False)[:1])


def _look_at_system(renderer: Renderer, needs: Needs, found: _Findings) -> None:
    """A system message is told."""
    if not needs.system:
        return
    if (why := found.refused.get("system")) is not None:
        found.problems.append(f"an environment sends a system message, and {why}; leave out `system_prompt`, or use another template")
    elif SYSTEM[0]["content"] not in renderer.open_turn(None, [*SYSTEM, _user(QUESTIONS[0])]).text:
        found.problems.append(
            "an environment sends a system message, and the chat template leaves it out; leave out `system_prompt`, or use another template"
        )


def _look_at_tools(renderer: Renderer, needs: Needs, found: _Findings) -> None:
    """Tools, calls and their results are told."""
    if not needs.tools:
        return
    if (why := found.refused.get("tool")) is not None:
        found.problems.append(f"an environment offers tools, and {why}; use a model whose chat template has tools")
        return
    told = _text_with(renderer, [_user(QUESTIONS[0]), _calls(ODD_ARGUMENTS), *_results(1)], [TOOL])
    told = told or _text_with(renderer, [_user(QUESTIONS[0]), _says(REPLY), *_results(1)], [TOOL])
    if told is None:
        return
    if RESULT not in told:
        found.problems.append("an environment offers tools, and the chat template leaves out what they answer; use another template")
    if TOOL["function"]["description"] not in told:
        found.remarks.append("the prompt does not tell the policy of its tools: the chat template writes neither them nor a system message")
    if "'numbers'" in told or "True" in told:
        found.remarks.append(
            "the chat template writes the arguments of calls as Python does, which is no JSON: a reply that copies it is malformed"
        )


def _look_at_history(needs: Needs, found: _Findings) -> None:
    """What was said stays as it was said."""
    if not needs.turns:
        return
    if (why := found.refused.get("user")) is not None:
        found.problems.append(f"an environment plays several turns, and {why}; use another template")
    played = ["user", *["system"] * needs.system, *["tool"] * needs.tools]
    rewritten = [kind for kind in played if kind in found.rewritten] or [kind for kind in ("thinking",) if kind in found.rewritten]
    if rewritten:
        what = "earlier thinking is dropped" if rewritten == ["thinking"] else "what was said before is rewritten"
        num_others = len(found.rewritten) - 1
        others = f", and so in {num_others} other kind{'s' * (num_others > 1)} of conversation" if num_others else ""
        found.remarks.append(
            'turns are trained as branches, each with its own copy of the prompt, unless the environment has `history = "keep"`, which '
            f"goes on from what the model saw: {what} by a later turn ({found.rewritten[rewritten[0]]}){others}"
        )
