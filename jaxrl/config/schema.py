"""What a key of the configuration may hold, read off the section classes: alternatives, items, defaults, paths.

In: annotations of `Section` fields and the plain tables of a TOML file. Out: which section class a table will be read
as, and what a part-written table inherits. It is the schema that `config.load` walks; it neither parses text nor words
an error.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import Tag
from pydantic.fields import FieldInfo

from jaxrl.config.base import Section

KeyPath = tuple[str | int, ...]
"""Where a value stands in the tables: field names and list indices."""


def dotted(path: KeyPath) -> str:
    """Return a path as a person writes it.

    Example:
      >>> dotted(("orchestrator", "train", "env", 0))
      'orchestrator.train.env.0'
    """
    return ".".join(str(step) for step in path)


def alternatives(annotation: Any) -> list[Any]:
    """Return the alternatives of an annotation, unions and `Annotated` undone."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return alternatives(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [option for part in get_args(annotation) for option in alternatives(part)]
    return [annotation]


def section_types(annotation: Any) -> list[type[Section]]:
    """Return the section classes among an annotation's alternatives."""
    return [option for option in alternatives(annotation) if isinstance(option, type) and issubclass(option, Section)]


def union_tags(annotation: Any) -> list[str]:
    """Return the tags of a union that a function tells apart (`pydantic.Discriminator`); such tags are no keys."""
    own = [part.tag for part in getattr(annotation, "__metadata__", ()) if isinstance(part, Tag)]
    return own + [tag for part in get_args(annotation) if get_origin(annotation) is not Literal for tag in union_tags(part)]


def section_of(annotation: Any, table: Any) -> type[Section] | None:
    """Return the section class that a table will be read as; None for a free table, a list, or an unknown `type`."""
    candidates = section_types(annotation)
    if not isinstance(table, dict) or len(candidates) < 2:
        return candidates[0] if candidates and isinstance(table, dict) else None
    return next((s for s in candidates if s.model_fields["type"].default == table.get("type")), None)


def item_of(annotation: Any) -> Any:
    """Return the annotation of a list's items."""
    return next((get_args(option)[0] for option in alternatives(annotation) if get_origin(option) is list), Any)


def annotation_at(root: type[Section], path: KeyPath) -> Any:
    """Return the annotation at a path below `root` that passes through known fields; the last table's type need not be known."""
    candidates: list[type[Section]] = [root]
    annotation: Any = root
    for step in path:
        if isinstance(step, int):
            annotation = item_of(annotation)
        else:
            annotation = next((s.model_fields[step].annotation for s in candidates if step in s.model_fields), Any)
        candidates = section_types(annotation)
    return annotation


def default_of(field: FieldInfo) -> Any:
    """Return a field's default, or None when it is required."""
    return None if field.is_required() else field.get_default(call_default_factory=True)


def default_tables(field: FieldInfo) -> Any:
    """Return what an override by key or index starts from where the file says nothing."""
    default = default_of(field)
    if isinstance(default, list):
        return [item.model_dump(exclude_none=True) if isinstance(item, Section) else item for item in default]
    if default is None and item_of(field.annotation) is not Any:
        return []
    return with_default_type(field, {})


def with_default_type(field: FieldInfo, table: dict[str, Any]) -> dict[str, Any]:
    """Give a table without `type` the type that the field has by default, and return it."""
    default = default_of(field)
    if isinstance(default, Section) and "type" in type(default).model_fields:
        table.setdefault("type", type(default).model_fields["type"].default)
    return table


def fill_inherited(section: type[Section], table: dict[str, Any]) -> None:
    """Complete tables given in part with what their field's default sets: naming one key resets no neighbour."""
    for name, field in section.model_fields.items():
        value = table.get(name)
        if isinstance(value, dict) and section_types(field.annotation):
            with_default_type(field, value)
            child, default = section_of(field.annotation, value), default_of(field)
            if child is not None and type(default) is child:
                for key, inherited in default.model_dump(include=default.model_fields_set, exclude_none=True).items():
                    value.setdefault(key, inherited)
            if child is not None:
                fill_inherited(child, value)
        elif isinstance(value, list):
            for item in value:
                child = section_of(item_of(field.annotation), item)
                if child is not None:
                    fill_inherited(child, item)


def values_named(name: str, section: Section, path: KeyPath = ()) -> Iterator[tuple[str, Any]]:
    """Yield key and value of every field called `name` in a section and the sections below it, where it is not null."""
    for field in type(section).model_fields:
        value, here = getattr(section, field), (*path, field)
        if field == name and value is not None:
            yield dotted(here), value
        children = [((*here, i), item) for i, item in enumerate(value)] if isinstance(value, list) else [(here, value)]
        for where, child in children:
            if isinstance(child, Section):
                yield from values_named(name, child, where)


def all_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield every key of a section and of the sections below it, of whatever type; `N` stands for a list index."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        item = item_of(field.annotation)
        for child in section_types(field.annotation if item is Any else item):
            yield from all_keys(child, f"{prefix}{name}." if item is Any else f"{prefix}{name}.N.")
