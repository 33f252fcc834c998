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
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if parameters.get("type") != "object":
        return f"`type` must be 'object', got {parameters.get('type')!r}"
    if not isinstance(properties, Mapping) or not all(isinstance(value, Mapping) for value in properties.values()):
        return f"`properties` must map names to schemas, got {reprlib.repr(properties)}"
    if not isinstance(required, list) or not all(name in properties for name in required):
        return f"`required` must list names of `properties`, got {required!r}"
    unknown = sorted({name for schema in properties.values() for name in _types(schema)} - set(_TYPES))
    return f"there is no JSON type {unknown[0]!r}; there are {sorted(_TYPES)}" if unknown else ""


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
