"""A model's chat template as a function: messages and tools to the text of a conversation.

In: messages and tools in the shape of `messages`. Out: text, and what is peculiar to the template: whether it writes tools, how
it ends a reply. Where it writes no tools, they are told in the system message. It knows no tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl.errors import EnvError
from jaxrl.inference.rendering.messages import Messages, Tools, whole_characters, with_arguments_as_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PINNED_DATE = "{% macro strftime_now(format) %}01 Jan 2025{% endmacro %}"
"""Put before a template that asks for today's date: with it in the prompts, a run resumed tomorrow would be another
run."""

PROBE = "jaxrl"
"""Content of the messages that show what a template does."""

_PROBE_TOOL = {"type": "function", "function": {"name": PROBE, "description": PROBE, "parameters": {"type": "object", "properties": {}}}}

DescribeTools = Callable[[Tools], str]
"""Tells the policy in words which tools there are and how to call them."""


class ChatTemplate:
    """The chat template of one tokenizer. Immutable after construction, so worker threads may share it.

    Args:
      tokenizer: has the special tokens that the template names.
      source: the template.
      describe_tools: what the system message says of tools if the template says nothing.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, source: str, describe_tools: DescribeTools) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render_jinja = render_jinja_template
        self._special_tokens: dict[str, Any] = tokenizer.special_tokens_map
        self._source = (_PINNED_DATE if "strftime_now" in source else "") + source
        self._describe_tools = describe_tools

    def render(self, messages: Sequence[dict[str, Any]], tools: Tools = (), *, add_generation_prompt: bool) -> str:
        """Return the text of a conversation.

        Raises:
          EnvError: the template refuses it.
        """
        if tools and not self.writes_tools:
            messages, tools = self._with_description(messages, self._describe_tools(tools)), ()
        if self._takes_arguments_as_text and any(message.get("tool_calls") for message in messages):
            messages = with_arguments_as_text(messages)
        return self._apply(messages, tools, add_generation_prompt=add_generation_prompt)

    @functools.cached_property
    def writes_tools(self) -> bool:
        """True if the template shows the policy the tools that it is given."""
        question: Messages = ({"role": "user", "content": PROBE},)
        try:
            with_tool = self._apply(question, (_PROBE_TOOL,), add_generation_prompt=True)
        except EnvError:
            return False
        return with_tool != self._apply(question, (), add_generation_prompt=True)

    @functools.cached_property
    def reply_end(self) -> str:
        """What the template writes after the last reply of a conversation.

        Raises:
          EnvError: the template refuses a question and an answer.
        """
        messages: Messages = ({"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE})
        text = self._apply(messages, (), add_generation_prompt=False)
        return text[text.rfind(PROBE) + len(PROBE) :]

    @functools.cached_property
    def _takes_system(self) -> bool:
        """True if the template shows the policy what a system message says."""
        messages: Messages = ({"role": "system", "content": PROBE}, {"role": "user", "content": "hello"})
        try:
            return PROBE in self._apply(messages, (), add_generation_prompt=True)
        except EnvError:
            return False

    @functools.cached_property
    def _takes_arguments_as_text(self) -> bool:
        """True if the template writes arguments as they are: an object would read as Python writes it, which is no JSON."""
        call = {"id": "000000000", "type": "function", "function": {"name": "probe", "arguments": {PROBE: True}}}
        messages: Messages = ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "", "tool_calls": [call]})
        try:
            return f"{{'{PROBE}': True}}" in self._apply(messages, (), add_generation_prompt=False)
        except EnvError:  # perhaps over an object where it wants a text
            try:
                return PROBE in self._apply(with_arguments_as_text(messages), (), add_generation_prompt=False)
            except EnvError:
                return False

    def _with_description(self, messages: Sequence[dict[str, Any]], description: str) -> Sequence[dict[str, Any]]:
        """Return a conversation whose first system message tells of tools; its first question, if there is no system role."""
        role = "system" if self._takes_system else "user"
        first = next((index for index, message in enumerate(messages) if message["role"] == role), None)
        if first is not None and (role == "user" or first == 0):
            told = messages[first]
            parts = (told["content"], description) if role == "system" else (description, told["content"])
            return [*messages[:first], {**told, "content": "\n\n".join(filter(None, parts))}, *messages[first + 1 :]]
        return [{"role": "system", "content": description}, *messages] if role == "system" else messages

    def _apply(self, messages: Sequence[dict[str, Any]], tools: Tools, *, add_generation_prompt: bool) -> str:
        try:
            # What `apply_chat_template` calls, without its passes over messages that are plain already: half the time.
            rendered, _ = self._render_jinja(
                conversations=[list(messages)],
                tools=list(tools) or None,
                chat_template=self._source,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program of whoever made the model: it may raise anything
            roles = [message["role"] for message in messages]
            raise EnvError(f"the chat template refused messages with the roles {roles}: {error}") from error
        return whole_characters(str(rendered[0]))
