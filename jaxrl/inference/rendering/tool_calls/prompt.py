"""Tools and calls in text: how the policy is told of them where its chat template does not, and how a call is written.

In: OpenAI-style tool schemas, a format. Out: a part of a system message, or the text of a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.inference.rendering.tool_calls.choice import FORMATS


def tool_prompt(tools: Sequence[Mapping[str, Any]], tool_format: str) -> str:
    r"""Return what a system message says of tools, for a chat template that says nothing of them.

    Args:
      tools: schemas, `{"type": "function", "function": {"name", "description", "parameters"}}`; at least one.
      tool_format: `hermes`, `llama3`, `mistral` or `xml`.

    Example:
      >>> print(tool_prompt([{"type": "function", "function": {"name": "add"}}], "llama3"))
      You can call these tools. Each line is the JSON schema of one:
      {"name": "add"}
      <BLANKLINE>
      To call a tool, reply with nothing but a JSON object of its name and its arguments:
      {"name": "the tool's name", "parameters": {"argument": "value"}}
      To call several tools, write several such objects with ; between them.
    """
    schemas = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return f"You can call these tools. Each line is the JSON schema of one:\n{schemas}\n\n{FORMATS[tool_format].instruction}"


def call_text(tool_format: str, name: str, arguments: Mapping[str, Any]) -> str:
    r"""Return a call as a policy writes it: for demonstrations and tests. Several calls are written one after another.

    Args:
      tool_format: `hermes`, `llama3`, `mistral` or `xml`.
      name: the tool.
      arguments: what it is called with; JSON.

    Raises:
      ValueError: the arguments are no JSON, or the format has no way to write a name.

    Example:
      >>> call_text("hermes", "add", {"a": 8, "b": 3})
      '<tool_call>\n{"name": "add", "arguments": {"a": 8, "b": 3}}\n</tool_call>'
    """
    return FORMATS[tool_format].write(name, arguments)
