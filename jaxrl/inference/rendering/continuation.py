"""How a conversation goes on after a reply: what stays as the model saw it, and which text follows.

In: what the model saw, new messages, a chat template. Out: ways to write the next prompt, the best first. Each is a conversation that the
template can render, and where in its text the part begins that the model has not seen. It encodes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl.config.turns import History
from jaxrl.errors import EnvError
from jaxrl.inference.rendering.attribution import unused_mark
from jaxrl.inference.rendering.chat_template import PROBE, ChatTemplate
from jaxrl.inference.rendering.messages import Messages, Tools, told_apart
from jaxrl.inference.rendering.turns import RenderState


@dataclass(frozen=True, slots=True)
class Way:
    """One way to write the next prompt."""

    messages: Messages
    """What the template renders: the conversation, or a small one that stands in for it."""
    tools: Tools
    """What it is told of tools."""
    first: int
    """The first message that the model has not seen."""
    text: str
    """What the template makes of it, with the generation prompt."""
    start: int
    """Index into `text` of what the model has not seen."""
    is_fork: bool = False
    """True if the model is to see the whole text anew."""
    is_as_rendered: bool = True
    """False if the whole prompt is not what the template writes for the conversation with its replies as they are."""
    spellings: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """What the template may make of contents, by index of the message."""


def ways_on(
    template: ChatTemplate, prior: RenderState | None, new: Messages, tools: Tools, history: History, stops: Sequence[str]
) -> Iterator[Way]:
    """Yield the ways to write the next prompt that the template takes, the best first; at the end the ones that begin anew.

    Args:
      template: the model's.
      prior: what the model saw; None if nothing was said.
      new: the new messages.
      tools: what the policy may call.
      history: `keep` goes on from what the model saw even where the template rewrites it.
      stops: the texts of the ids that end a reply.

    Raises:
      EnvError: the template takes none, with its reason.
    """
    conversation = (prior.messages if prior else ()) + new
    whole = refusal = None
    try:
        whole = template.render(conversation, tools, add_generation_prompt=True)
    except EnvError as error:
        refusal = error
    replies = prior.replies if prior else {}
    if prior is not None:
        if whole is not None and (start := _end_of_seen(template, prior, whole)) is not None:
            yield Way(conversation, tools, len(prior.messages), whole, start)
        if tools == prior.tools:
            if history == "keep":
                yield from _beside(template, prior, new, tools, stops)
            yield from _told_apart(template, prior, new, tools, stops)
    if whole is not None:
        spellings = {index: (reply.content, _tail(conversation[index]["content"], reply.content)) for index, reply in replies.items()}
        yield Way(conversation, tools, 0, whole, 0, is_fork=prior is not None, spellings=spellings)
    told = told_apart(conversation, replies)
    if told != conversation:
        try:
            text = template.render(told, tools, add_generation_prompt=True)
        except EnvError:
            pass
        else:
            yield Way(told, tools, 0, text, 0, is_fork=True, is_as_rendered=False)
            return
    if refusal is not None:
        raise refusal


def _tail(raw: str, content: str) -> str:
    """Return the end of a reply that is its visible text, with the white space around it: what is left where thinking is cut off."""
    begin = raw.rfind(content.rstrip())
    before = raw[:begin] if begin >= 0 else raw
    return raw[len(before.rstrip()) :]


def _end_of_seen(template: ChatTemplate, prior: RenderState, text: str) -> int | None:
    """Return where the part of `text` begins that the model has not seen; None if the rest is not what it saw.

    White space at the edges of a reply is no difference: many templates trim.
    """
    if prior.template_text is None:
        return None
    reply = prior.messages[-1]["content"]
    if text.startswith(prior.template_text + reply):
        return _after_stop(template, text, len(prior.template_text) + len(reply), prior.stop_text)
    seen = prior.template_text if text.startswith(prior.template_text) else prior.template_text.rstrip()
    if not text.startswith(seen):
        return None
    at = len(seen)
    for word in reply.split():
        while at < len(text) and text[at].isspace():
            at += 1
        if not text.startswith(word, at):
            return None
        at += len(word)
    return _after_stop(template, text, at, prior.stop_text)


def _after_stop(template: ChatTemplate, text: str, at: int, stop: str) -> int:
    """Return where `text` goes on after a reply that ends at `at`: behind the stop that was sampled, if the template writes the same."""
    if stop:
        end = _plain_end(template)
        for gap in ("", end[: len(end) - len(end.lstrip())]):
            if text.startswith(gap + stop, at):
                return at + len(gap) + len(stop)
    return at


def _told_apart(template: ChatTemplate, prior: RenderState, new: Messages, tools: Tools, stops: Sequence[str]) -> Iterator[Way]:
    """Yield the way of a template that wants replies taken apart, if it keeps history then."""
    told = told_apart(prior.messages, prior.replies)
    if told == prior.messages:
        return
    try:
        asked = template.render(told[:-1], tools, add_generation_prompt=True).rstrip()
        closed = template.render(told, tools, add_generation_prompt=False).rstrip()
        text = template.render((*told, *new), tools, add_generation_prompt=True)
    except EnvError:
        return
    if not (closed.startswith(asked) and text.startswith(closed) and _writes_all(template, told, tools)):
        return
    start = _after_stop(template, text, _end_of_reply(template, closed, stops), prior.stop_text)
    yield Way((*told, *new), tools, len(told), text, start, is_as_rendered=False)


def _writes_all(template: ChatTemplate, told: Messages, tools: Tools) -> bool:
    """Say whether a template writes the thinking, the text and the calls of the last reply, or drops some of them."""
    *before, reply = told
    mark = unused_mark(str(told), str(tools))
    marked = {**reply, **{part: f"{mark}{part}" for part in ("reasoning_content", "content") if reply.get(part)}}
    calls = reply.get("tool_calls", ())
    if calls:
        marked["tool_calls"] = [{**call, "function": {**call["function"], "name": f"{mark}{index}z"}} for index, call in enumerate(calls)]
    try:
        text = template.render((*before, marked), tools, add_generation_prompt=False)
    except EnvError:
        return False
    parts = [marked[part] for part in ("reasoning_content", "content") if reply.get(part)]
    return all(part in text for part in (*parts, *(f"{mark}{index}z" for index in range(len(calls)))))


def _beside(template: ChatTemplate, prior: RenderState, new: Messages, tools: Tools, stops: Sequence[str]) -> Iterator[Way]:
    """Yield ways in which a small conversation stands in for what the model saw, so that nothing of that is rendered."""
    mark = unused_mark(str(new), str(tools))
    reply: dict[str, Any] = {"role": "assistant", "content": mark}
    calls = told_apart(prior.messages[-1:], {0: prior.reply})[0].get("tool_calls")
    for stand_in in (reply, {**reply, "tool_calls": calls}) if calls else (reply,):
        # A template may write tools before the last question, which is another one now; the model saw them where they were.
        for shown in (tools, ()) if tools else ((),):
            before = ({"role": "user", "content": PROBE}, stand_in)
            try:
                closed = template.render(before, shown, add_generation_prompt=False).rstrip()
                text = template.render((*before, *new), shown, add_generation_prompt=True)
            except EnvError:
                continue
            if "tool_calls" in stand_in:
                is_same, end = text.startswith(closed), _end_of_reply(template, closed, stops)
            else:
                (to_mark, found, _), seen = text.partition(mark), closed.partition(mark)[0]
                is_same, end = bool(found) and (not shown or to_mark == seen), len(to_mark) + len(mark)
            if is_same:
                start = _after_stop(template, text, end, prior.stop_text)
                yield Way((*before, *new), shown, len(before), text, start, is_as_rendered=False)


def _end_of_reply(template: ChatTemplate, closed: str, stops: Sequence[str]) -> int:
    """Return where the last reply ends in a conversation without white space at its end: before what closes the turn."""
    end = _plain_end(template).rstrip()
    if end and closed.endswith(end):
        return len(closed) - len(end)
    ends = [closed.rfind(stop) for stop in stops if stop and closed.endswith(stop)]
    return min(ends, default=len(closed))


def _plain_end(template: ChatTemplate) -> str:
    try:
        return template.reply_end
    except EnvError:
        return ""
