"""Whether the arguments of a call fit a tool's schema, in words for the policy.

Of a JSON schema this reads `type`, `enum`, `properties`, `required`, `additionalProperties` and `items`. Whatever else it says is
for the policy and for the tool. A name that `properties` lacks is refused unless `additionalProperties` allows it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
"""JSON's types; a bool is no number."""


def misfit(value: Any, schema: Mapping[str, Any], where: str = "the arguments") -> str:
    """Say why a JSON value does not fit a schema; empty if it does.

    Example:
      >>> schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
      >>> misfit({"city": "Ghent", "days": 2}, schema)
      ''
      >>> misfit({"city": "Ghent", "days": "two"}, schema)
      "`days` must be of type integer, got 'two'"
      >>> misfit({"town": "Ghent"}, schema)
      '`city` is missing'
      >>> misfit({"city": "Ghent", "town": "Ghent"}, schema)
      'there is no `town`; there are `city`, `days`'
    """
    types = _types(schema)
    if types and not any(_is_of(value, name) for name in types):
        return f"{where} must be of type {' or '.join(types)}, got {reprlib.repr(value)}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} must be one of {schema['enum']}, got {reprlib.repr(value)}"
    if isinstance(value, dict):
        return _misfit_of_object(value, schema)
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        found = (misfit(item, schema["items"], f"item {index} of {where}") for index, item in enumerate(value))
        return next(filter(None, found), "")
    return ""


def schema_error(parameters: Mapping[str, Any]) -> str:
    """Say why a mapping is no schema of arguments; empty if it is one.

    Example:
      >>> schema_error({"type": "string"})
      "`type` must be 'object', got 'string'"
    """
    if parameters.get("type") != "object":
        return f"`type` must be 'object', got {parameters.get('type')!r}"
    return _unreadable(parameters)


def _unreadable(schema: Mapping[str, Any], where: str = "") -> str:
    """Say what in a schema, or in one inside of it, is not what `misfit` takes it for; empty if all of it is."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    types, enum, items = schema.get("type", []), schema.get("enum", []), schema.get("items")
    if not isinstance(properties, Mapping) or not all(isinstance(part, Mapping) for part in properties.values()):
        return f"`properties`{where} must map names to schemas, got {reprlib.repr(properties)}"
    if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
        return f"`required`{where} must list names of `properties`, got {required!r}"
    if not isinstance(enum, list):
        return f"`enum`{where} must be a list, got {enum!r}"
    named = [types] if isinstance(types, str) else types
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        return f"`type`{where} must be the name of a JSON type, or a list of them, got {types!r}"
    if unknown := sorted(set(named) - set(_TYPES)):
        return f"there is no JSON type {unknown[0]!r}; there are {sorted(_TYPES)}"
    parts = [*properties.items(), *([("items", items)] if isinstance(items, Mapping) else [])]
    return next(filter(None, (_unreadable(part, f" of `{name}`") for name, part in parts)), "")


def _misfit_of_object(value: dict[str, Any], schema: Mapping[str, Any]) -> str:
    properties = schema.get("properties", {})
    if missing := [name for name in schema.get("required", []) if name not in value]:
        return f"`{missing[0]}` is missing"
    unknown = [name for name in value if name not in properties]
    if unknown and "properties" in schema and not schema.get("additionalProperties", False):
        known = "there are " + ", ".join(f"`{name}`" for name in properties) if properties else "there are none"
        return f"there is no `{unknown[0][:64]}`; {known}"
    found = (misfit(value[name], part, f"`{name}`") for name, part in properties.items() if name in value)
    return next(filter(None, found), "")


def _types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema allows; empty if it does not say."""
    named = schema.get("type", [])
    return [named] if isinstance(named, str) else list(named)


def _is_of(value: Any, name: str) -> bool:
    return isinstance(value, _TYPES.get(name, (object,))) and (not isinstance(value, bool) or name not in ("integer", "number"))
