"""What is wrong with a configuration, in words: one sentence for each mistake.

In: what pydantic found, the tables that it read, and what the command line had set in them. Out: sentences with the full key, the value,
where it came from, what was expected and what to do. Nothing is read or set here.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from jaxrl.config.base import Section
from jaxrl.config.dump import one_line, redact
from jaxrl.config.schema import (
    KeyPath,
    all_keys,
    alternatives,
    annotation_at,
    default_of,
    dotted,
    item_of,
    section_of,
    section_types,
    union_tags,
)


def report(problems: list[str]) -> str:
    """Return all that is wrong in one message."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} settings are wrong:\n" + "\n".join(f"- {problem}" for problem in problems)


def explain(error: ErrorDetails, root: type[Section], table: dict[str, Any], set_paths: list[KeyPath], source: Path | None) -> str:
    """Turn one pydantic error into a sentence: key, value, where it came from, what was expected, what to do."""
    path, section, field, annotation = _locate(error["loc"], root, table)
    if error["type"] == "value_error":
        return _with_full_key(str(error["ctx"]["error"]) if "ctx" in error else error["msg"], path, annotation)
    kind = error["type"]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        tags = [s.model_fields["type"].default for s in section_types(annotation)]
        path, annotation = (*path, "type"), Literal[tuple(tags)]
        if kind == "union_tag_not_found":
            return f"`{dotted(path)}` is missing: expected {_expected(annotation)}"
    key = dotted(path)
    if kind == "missing":
        owner = dotted(path[:-1]) or "the top level"
        meaning = f" ({one_line(field.description)})" if field is not None and field.description else ""
        return f"`{key}` is missing: expected {_expected(annotation, field)}{meaning}; set `{path[-1]}` in `{owner}` or give `--{key}`"
    origin = origin_of(path, set_paths, source)
    if kind == "extra_forbidden":
        return f"unknown key `{key}` (from {origin}){_nearest_key(root, path, section)}"
    value = error["input"].get("type") if kind == "union_tag_invalid" else error["input"]
    text = "null" if value is None else repr(redact(value, str(path[-1])))
    near = did_you_mean(value, [str(v) for o in alternatives(annotation) if get_origin(o) is Literal for v in get_args(o)])
    default = default_of(field) if field is not None else None
    hint = "" if default is None or isinstance(default, Section | list) else f"; the default is {default!r}"
    return f"`{key}`={text} (from {origin}): expected {_expected(annotation, field, redact(value, str(path[-1])))}{near or hint}"


def _with_full_key(message: str, path: KeyPath, annotation: Any) -> str:
    """Give a validator's sentence the full key: it opens with one of its own section, or with that of the whole run, or with none."""
    opening = re.match(r"`(\w+)[\w.]*`", message)
    if opening and path and opening[1] == path[-1]:
        return f"`{dotted((*path[:-1], message[1:]))}"
    if opening and path and any(opening[1] in section.model_fields for section in section_types(annotation)):
        return f"`{dotted((*path, message[1:]))}"
    return message if not path or f"`{dotted(path)}" in message else f"`{dotted(path)}`: {message}"


def origin_of(path: KeyPath, set_paths: list[KeyPath], source: Path | None) -> str:
    """Return in words where a setting came from."""
    is_override = any(path[: len(p)] == p or p[: len(path)] == path for p in set_paths)
    return "the command line" if is_override or source is None else f"`{source}`"


def _locate(
    loc: tuple[Any, ...], root: type[Section], table: dict[str, Any]
) -> tuple[KeyPath, type[Section] | None, FieldInfo | None, Any]:
    """Walk a pydantic location, whose union tags are no keys, to its path, section, field and annotation."""
    path: KeyPath = ()
    value: Any = table
    annotation: Any = root
    section: type[Section] | None = None
    field: FieldInfo | None = None
    steps = list(loc)
    while steps:
        step = steps.pop(0)
        if isinstance(value, list) and isinstance(step, int):
            annotation, section, field = item_of(annotation), None, None
        elif isinstance(value, dict):
            section = section_of(annotation, value)
            field = section.model_fields.get(step) if section is not None else None
            annotation = field.annotation if field is not None else Any
        else:
            break
        path = (*path, step)
        value = value[step] if isinstance(value, list) else value.get(step)
        has_type_tag = len(section_types(annotation)) > 1 and isinstance(value, dict) and steps[:1] == [value.get("type")]
        if has_type_tag or (steps and steps[0] in union_tags(annotation)):
            steps.pop(0)
    return path, section, field, annotation


def _expected(annotation: Any, field: FieldInfo | None = None, value: Any = None) -> str:
    """Say in words what a field takes; a string, in place of a list of them, is shown as one."""
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", type(None): "null", Any: "a value"}
    words: list[str] = []
    sections = section_types(annotation)
    for option in alternatives(annotation):
        if get_origin(option) is Literal:
            words.append("one of " + ", ".join(repr(v) for v in get_args(option)))
        elif get_origin(option) is list:
            is_item = isinstance(value, str) and str in alternatives(item_of(option))
            example = json.dumps([value] if is_item else ["a", "b"], ensure_ascii=False)
            words.append("a list of tables" if section_types(item_of(option)) else f"a list, such as '{example}'")
        elif len(sections) > 1 and option in sections:
            words.append("a table whose `type` is one of " + ", ".join(repr(s.model_fields["type"].default) for s in sections))
        else:
            words.append(names.get(option) or _table_in_words(option))
    bounds, forms = [], []
    for rule in field.metadata if field is not None else ():
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"), ("multiple_of", "a multiple of")):
            if getattr(rule, name, None) is not None:
                bounds.append(f"{sign} {getattr(rule, name)}")
        if getattr(rule, "min_length", None):
            forms.append(", not empty")
        if getattr(rule, "pattern", None):
            forms.append(f" of the form {rule.pattern}")
    return " or ".join(dict.fromkeys(words)) + (" " + " and ".join(bounds) if bounds else "") + "".join(forms)


def _table_in_words(option: Any) -> str:
    """Say what a table must hold."""
    required = [f"`{key}`" for s in section_types(option) for key, field in s.model_fields.items() if field.is_required()]
    return f"a table with {' and '.join(required)}" if required else "a table"


def _nearest_key(root: type[Section], path: KeyPath, section: type[Section] | None) -> str:
    """Say which key was probably meant: a near one in the section, else the same name elsewhere, else all there are."""
    if section is None:
        return ""
    unknown, parent = str(path[-1]), path[:-1]
    near = difflib.get_close_matches(unknown.replace("-", "_"), section.model_fields, n=1)
    if near:
        return f"; did you mean `{dotted((*parent, near[0]))}`?"
    siblings = [s for s in section_types(annotation_at(root, parent)) if unknown.replace("-", "_") in s.model_fields]
    if siblings:
        tags = " or ".join(repr(s.model_fields["type"].default) for s in siblings)
        return f"; it belongs to `{dotted((*parent, 'type'))}`={tags}, this is {section.model_fields['type'].default!r}"
    elsewhere = [key for key in all_keys(root) if key.rpartition(".")[2] == unknown]
    if elsewhere:
        return f"; that key belongs to `{elsewhere[0]}`"
    return "; expected one of " + ", ".join(f"`{name}`" for name in section.model_fields)


def did_you_mean(text: Any, choices: Sequence[str]) -> str:
    """Return what was probably meant, as the end of a sentence; nothing if nothing is near."""
    near = difflib.get_close_matches(str(text), choices, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def unwritable(root: type[Section], value: Any, path: KeyPath = (), is_nested: bool = False) -> Iterator[str]:
    """Say what a TOML copy of the configuration cannot or must not hold: null in a free table or list, and secrets."""
    if isinstance(value, dict):
        is_free = bool(path) and not section_types(annotation_at(root, path))
        for key, child in value.items():
            yield from unwritable(root, child, (*path, key), is_free)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from unwritable(root, child, (*path, index), True)
    elif value is None and is_nested:
        yield f"`{dotted(path)}`=null: TOML has no null inside a table of free keys or a list; leave it out"
    elif isinstance(value, str):
        name = next((s for s in reversed(path) if isinstance(s, str)), "")
        # A short string under such a name is a marker such as "</s>", not a credential.
        if redact(value) != value or (len(value) >= 8 and redact(value, name) != value):
            yield (
                f"`{dotted(path)}` looks like a secret, and configurations are printed and kept in run folders; put the value into an "
                "environment variable and name that variable instead"
            )
