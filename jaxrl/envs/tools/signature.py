"""What a function says of itself, as the schema of a tool. It runs in worker processes, so it imports nothing that starts slowly."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", type(None): "null"}


def described(import_path: str) -> dict[str, Any]:
    """Import a function and return what its docstring and its signature say of it; called in worker processes.

    Returns:
      `description`, the first paragraph of the docstring, and `parameters`, a JSON schema: of a parameter's annotation it tells
      str, int, float, bool, list, dict, None and unions and literals of such; anything else fits any value.

    Raises:
      TypeError: it is no function, or takes arguments by position only.

    Example:
      >>> described("shutil:which")["parameters"]["required"]
      ['cmd']
    """
    module, _, name = import_path.partition(":")
    function = getattr(importlib.import_module(module), name)
    if not callable(function):
        raise TypeError(f"{name!r} is no function, it is a {type(function).__name__}")
    paragraph = (inspect.getdoc(function) or "").partition("\n\n")[0]
    return {"description": " ".join(paragraph.split()), "parameters": schema_of(function)}


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of the arguments that a function takes by name."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    hints = {}
    with contextlib.suppress(Exception):  # an annotation may name what only a type checker sees
        hints = typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            schema["additionalProperties"] = True
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise TypeError(f"{name!r} can be given by position only, and a tool is called with names")
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            properties[name] = _schema_of_annotation(hints.get(name, Any))
            if parameter.default is parameter.empty:
                required.append(name)
    return schema


def _schema_of_annotation(annotation: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        parts = [_schema_of_annotation(part).get("type") for part in arguments]
        return {"type": parts} if all(isinstance(part, str) for part in parts) else {}
    json_type = _JSON_TYPES.get(origin or annotation)
    if json_type is None:
        return {}
    items = _schema_of_annotation(arguments[0]) if json_type == "array" and arguments else {}
    return {"type": json_type} | ({"items": items} if items else {})
