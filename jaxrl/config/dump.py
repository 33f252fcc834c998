"""A configuration as documented TOML, and secrets cut out of anything that is shown or written.

In: a `Section`, or any JSON-like value. Out: text that `config.load` reads back into an equal configuration, or the
value without its secrets. It never reads a file or an environment variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w

from jaxrl.config.base import Section

_SECRET_NAME = re.compile(r"(api_?key|secret|passwd|password|token|credentials?|private_?key|access_?key|authorization)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_\w{20,}|xox[abp]-[\w-]{10,}|AKIA[0-9A-Z]{16}"
    r"|AIza[\w-]{30,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
    r"|(?i:bearer)\s+\S{8,}|(?<=://)[^/\s:@]*:[^/\s]+(?=@)"
)


def dump_toml(config: Section) -> str:
    """Return a configuration as documented TOML: every field with its value and, above it, its meaning.

    A null field stands as a comment without a value, because TOML has no null. Loading the text again gives an equal configuration.
    """
    return "\n".join(_toml_lines(config, "")).strip() + "\n"


def redact(value: Any, key: str = "") -> Any:
    """Return a JSON-like value with everything that looks like a secret replaced by `<redacted>`.

    A string is a secret when its key is named like one (`api_key`, `HF_TOKEN`, ...), and any part of a string that has
    the form of a known kind of credential is cut out.

    Example:
      >>> redact({"HF_TOKEN": "abc", "max_tokens": 5, "url": "http://me:pw@host/v1"})
      {'HF_TOKEN': '<redacted>', 'max_tokens': 5, 'url': 'http://<redacted>@host/v1'}
    """
    if isinstance(value, Mapping):
        return {k: redact(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(redact(v, key) for v in value)
    if not isinstance(value, str) or not value:
        return value
    return "<redacted>" if _SECRET_NAME.search(key.replace("-", "_")) else _SECRET_VALUE.sub("<redacted>", value)


def one_line(text: str) -> str:
    """Return a field's description as one line without its full stop."""
    return " ".join(text.split()).rstrip(".")


def _toml_lines(section: Section, prefix: str) -> Iterator[str]:
    """Yield a section's own keys, then its sub-tables: a key after a sub-table's header would belong to that."""
    tables: list[tuple[str, str, Section]] = []
    for name in sorted(type(section).model_fields, key=lambda name: name != "type"):
        value, key = getattr(section, name), f"{prefix}{name}"
        if value is None:
            meaning = one_line(type(section).model_fields[name].description or "")
            yield f"# {meaning}."
            yield f"# {name} ="
        elif isinstance(value, Section):
            tables.append((f"[{key}]", key, value))
        elif isinstance(value, list) and value and all(isinstance(item, Section) for item in value):
            tables += [(f"[[{key}]]", key, item) for item in value]
        else:
            yield f"# {one_line(type(section).model_fields[name].description or '')}."
            yield f"{name} = {_inline(value)}"
    for header, key, table in tables:
        yield from ("", header, *_toml_lines(table, f"{key}."))


def _inline(value: Any) -> str:
    """Return a value on one line of TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(tomli_w.dumps({str(k): 0}).removesuffix("0\n") + _inline(v) for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")
