"""Calls of tools in what a policy writes: finding them, telling the policy how to write them, writing one.

One module per format (`hermes`, `llama3`, `mistral`, `xml`); `parser` takes a reply apart with one of them, `choice` finds the one that
a model has.
"""

from jaxrl.inference.rendering.tool_calls.choice import FORMATS, find_parser
from jaxrl.inference.rendering.tool_calls.parser import CallParser
from jaxrl.inference.rendering.tool_calls.prompt import call_text, tool_prompt

__all__ = ["FORMATS", "CallParser", "call_text", "find_parser", "tool_prompt"]
