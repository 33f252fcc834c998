"""From a TOML file and a command line to a configuration: a `RunConfig`, or whatever root `Section` is asked for.

In: a path and tokens such as `--trainer.optimizer.lr 1e-4`. Out: a validated, frozen section, or one `ConfigError` that
lists every mistake with its full key, where it came from, what was expected and what to do. Unknown keys are one error
whatever their source. Only entry points import this module; nothing here reads an environment variable, touches a
device or writes a file.
"""

from __future__ import annotations

import argparse
import copy
import json
import tomllib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

from pydantic import ValidationError

from jaxrl.config.base import Section
from jaxrl.config.dump import redact
from jaxrl.config.mistakes import did_you_mean, explain, origin_of, report, unwritable
from jaxrl.config.retired import take_retired
from jaxrl.config.run import RunConfig
from jaxrl.config.schema import (
    KeyPath,
    alternatives,
    annotation_at,
    default_tables,
    dotted,
    fill_inherited,
    item_of,
    section_of,
    section_types,
)
from jaxrl.errors import ConfigError

Root = TypeVar("Root", bound=Section)
Source = str | Path | dict[str, Any]
"""A TOML file, or its tables as they were made of a command line."""


@dataclass(frozen=True, slots=True)
class Override:
    """One `--key value` of the command line; `value` is None for a bare flag."""

    key: str
    value: str | None


class CommandLine(NamedTuple):
    """A parsed command line: which file, which overrides (to hand to `load_config`), and the fixed flags."""

    path: Path
    overrides: list[str]
    flags: argparse.Namespace


TRAIN_EXAMPLES = "--orchestrator.group_size 16, --orchestrator.train.env.0.ratio 2, --orchestrator.sampling.stop '[\"\\n\"]'"
"""Overrides that show each form of a key and of a value."""


def build_parser(
    prog: str = "python -m jaxrl.train",
    description: str = "Train a policy.",
    *,
    examples: str = TRAIN_EXAMPLES,
    can_resume: bool = True,
) -> argparse.ArgumentParser:
    """Return a parser with the flags that every command on a configuration has; the caller may add its own.

    Args:
      prog: the command.
      description: what it does.
      examples: overrides, for the help text.
      can_resume: whether the command also takes a run folder.
    """
    source = "(--config FILE.toml | --resume RUN_DIR)" if can_resume else "--config FILE.toml"
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        usage=f"%(prog)s {source} [options] [--any.config.key VALUE ...]",
        epilog=f"Any key of the configuration can be set: {examples}. Values are JSON or TOML, else text; null unsets. "
        "--dry-run prints every key with its meaning.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the TOML file")
    if can_resume:
        parser.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on with the run in this folder, with its own config.toml")
    parser.add_argument("--dry-run", action="store_true", help="check the configuration, print it resolved, and stop")
    return parser


def parse_cli(argv: Sequence[str], parser: argparse.ArgumentParser | None = None, root: type[Section] = RunConfig) -> CommandLine:
    """Split a command line into the configuration file, configuration overrides and fixed flags.

    A token is an override when its name has a dot or is a section of the configuration; everything else is the
    parser's. With `--resume RUN_DIR` the file is `RUN_DIR/config.toml`, and the run's folder is `RUN_DIR`, wherever the
    file says that it once was.

    Args:
      argv: the arguments, without the program's name.
      parser: from `build_parser`, with more flags if wanted; None takes that of training.
      root: what the file is read as; its sections name the overrides.

    Returns:
      `(path, overrides, flags)`; `flags` has `config`, `dry_run`, `resume` where the parser has it, and the caller's own.

    Raises:
      SystemExit: with code 2 on a usage error, with code 0 after `--help`.

    Example:
      >>> path, overrides, flags = parse_cli(["--config", "a.toml", "--run.max-steps", "3", "--dry-run"])
      >>> str(path), overrides, flags.dry_run
      ('a.toml', ['--run.max-steps=3'], True)
    """
    parser = parser or build_parser()
    overrides, rest = take_overrides(argv, root)
    flags = parser.parse_args(rest)
    resume = getattr(flags, "resume", None)
    if (flags.config is None) == (resume is None):
        parser.error("give either --config FILE.toml or --resume RUN_DIR" if hasattr(flags, "resume") else "give --config FILE.toml")
    if resume is None:
        return CommandLine(flags.config, overrides, flags)
    return CommandLine(resume / "config.toml", [f"--run.output_dir={resume}", *overrides], flags)


def take_overrides(argv: Sequence[str], root: type[Section]) -> tuple[list[str], list[str]]:
    """Return the configuration overrides of a command line, one token each, and the other tokens."""
    found, rest = _split(argv, root)
    return [f"--{o.key}" if o.value is None else f"--{o.key}={o.value}" for o in found], rest


@overload
def load_config_aloud(path: str | Path, overrides: Sequence[str], say: Callable[[str], None]) -> RunConfig: ...
@overload
def load_config_aloud(path: Source, overrides: Sequence[str], say: Callable[[str], None], root: type[Root]) -> Root: ...
def load_config_aloud(path: Source, overrides: Sequence[str], say: Callable[[str], None], root: type[Section] = RunConfig) -> Section:
    """Do what `load_config` does, and say each of its warnings as a sentence instead of a Python warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load_config(path, overrides, root)
    for warning in caught:
        say(str(warning.message))
    return config


@overload
def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig: ...
@overload
def load_config(path: Source, overrides: Sequence[str], root: type[Root]) -> Root: ...
def load_config(path: Source, overrides: Sequence[str] = (), root: type[Section] = RunConfig) -> Section:
    """Read a configuration from a TOML file and the command line.

    The command line wins over the file. Among overrides the more specific key wins whatever their order, and of two
    equal keys the later one. A key may be kebab-case or snake_case. List items are set by index, appended at the index
    after the last, or given as JSON. A `type` that the command line changes drops the fields of the file that the new
    type does not have. A section given in part keeps its parent's defaults for the rest.

    Args:
      path: a TOML file, or its tables.
      overrides: tokens `--a.b.c value`, `--a.b.c=value` or, for booleans, `--a.b.c`.
      root: what the file is read as.

    Returns:
      The validated configuration.

    Raises:
      ConfigError: the file cannot be read, or any setting is unknown, of the wrong type, or inconsistent; all are
        listed.
    """
    source = None if isinstance(path, dict) else Path(path)
    table = copy.deepcopy(path) if isinstance(path, dict) else _read(Path(path))
    found, rest = _split(overrides, root)
    if rest:
        raise ConfigError(f"expected configuration overrides such as `--run.max_steps 10`, got {rest[0]!r}")
    fill_inherited(root, table)
    set_paths: list[KeyPath] = []
    problems: list[str] = []
    for override in sorted(found, key=_specificity):
        try:
            set_paths.append(_apply(root, table, override))
        except ConfigError as error:
            problems.append(str(error))
    retired = take_retired(table)
    problems[:0] = [f"{key.shown} (from {origin_of(key.path, set_paths, source)}) is of an earlier design: {key.hint}" for key in retired]
    fill_inherited(root, table)
    try:
        config = root.model_validate(table)
    except ValidationError as error:
        problems += [explain(e, root, table, set_paths, source) for e in error.errors()]
        raise ConfigError(report(problems)) from None
    problems += unwritable(root, config.model_dump())
    if problems:
        raise ConfigError(report(problems))
    return config


def _read(source: Path) -> dict[str, Any]:
    if source.is_dir():
        hint = f"; did you mean `{source / 'config.toml'}`?" if (source / "config.toml").is_file() else ""
        raise ConfigError(f"`{source}` is a directory, expected a TOML file{hint}")
    try:
        return tomllib.loads(source.read_text(encoding="utf-8"))
    except FileNotFoundError:
        others = [str(p) for p in source.parent.glob("*.toml")] if source.parent.is_dir() else []
        raise ConfigError(f"there is no configuration file `{source}`{did_you_mean(str(source), others)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"`{source}` cannot be read as UTF-8 text: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"`{source}` is not valid TOML: {error}; strings need quotes, and null is written by leaving the key out"
        ) from None


def _split(argv: Sequence[str], root: type[Section]) -> tuple[list[Override], list[str]]:
    """Take the overrides out of a command line."""
    overrides: list[Override] = []
    rest: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        name, equals, value = token.removeprefix("--").partition("=")
        is_key = "." in name or name.replace("-", "_") in root.model_fields
        if not token.startswith("--") or not is_key:
            rest.append(token)
        elif equals:
            overrides.append(Override(name, value))
        else:
            overrides.append(Override(name, tokens.pop(0) if tokens and not tokens[0].startswith("--") else None))
    return overrides, rest


def _specificity(override: Override) -> tuple[int, bool]:
    """Sort parents before children, and a `type` before its siblings, which are then those of the new type."""
    segments = override.key.split(".")
    return len(segments), segments[-1] != "type"


def _apply(root: type[Section], table: dict[str, Any], override: Override) -> KeyPath:
    """Set one override in the tables and return where."""
    holder: Any = table
    annotation: Any = root
    path: KeyPath = ()
    segments = override.key.split(".")
    for depth, segment in enumerate(segments):
        section = section_of(annotation, holder)
        step, annotation = _step(holder, annotation, segment, path)
        path = (*path, step)
        if depth == len(segments) - 1:
            value = _parse_value(override, annotation)
            if isinstance(holder, list):
                holder[step : step + 1] = [value]
                break
            if step == "type" and section is not None and value != holder.get("type"):
                _drop_fields_of(section, holder, value, section_types(annotation_at(root, path[:-1])), path[:-1])
            holder[step] = value
        else:
            holder = _open(holder, step, section, path)
    return path


def _step(holder: Any, annotation: Any, segment: str, path: KeyPath) -> tuple[Any, Any]:
    """Return the key or index that a segment means in its holder, and the annotation of what is there."""
    if isinstance(holder, list):
        if not segment.isdecimal() or int(segment) > len(holder):
            raise ConfigError(
                f"`{dotted(path)}` is a list of {len(holder)}: expected an index from 0 to {len(holder)} (which appends), got {segment!r}"
            )
        return int(segment), item_of(annotation)
    section = section_of(annotation, holder)
    if section is None:
        return segment, Any
    name = segment.replace("-", "_")
    field = section.model_fields.get(name)
    return (segment, Any) if field is None else (name, field.annotation)


def _open(holder: Any, step: Any, section: type[Section] | None, path: KeyPath) -> Any:
    """Return the table or list at `step`, made from the field's default where the file has none."""
    if isinstance(holder, list):
        if step == len(holder):
            holder.append({})
        child = holder[step]
    else:
        if holder.get(step) is None:
            field = section.model_fields.get(step) if section else None
            holder[step] = default_tables(field) if field else {}
        child = holder[step]
    if not isinstance(child, dict | list):
        raise ConfigError(f"`{dotted(path)}`={redact(child, str(step))!r} is a value, not a table: it has no keys to set")
    return child


def _parse_value(override: Override, annotation: Any) -> Any:
    """Turn the text of an override into a TOML value, guided by the field that takes it."""
    kinds = alternatives(annotation)
    text = override.value
    if text is None:
        if bool in kinds or Any in kinds:
            return True
        raise ConfigError(f"`{override.key}` needs a value: `--{override.key} VALUE`; only booleans may be bare flags")
    if text == "null":
        return None
    if str in kinds and not text.startswith('"'):
        return text
    try:
        return json.loads(text, parse_constant=lambda name: name)
    except ValueError:
        pass
    try:
        return tomllib.loads(f"value = {text}")["value"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return text


def _drop_fields_of(old: type[Section], holder: dict[str, Any], new_type: Any, candidates: list[type[Section]], path: KeyPath) -> None:
    new = next((c for c in candidates if c.model_fields["type"].default == new_type), None)
    if new is None:
        return
    dropped = [key for key in holder if key in old.model_fields and key not in new.model_fields]
    for key in dropped:
        del holder[key]
    if dropped:
        warnings.warn(
            f"`{dotted(path)}.type` was changed to {new_type!r} on the command line, so these settings of the file are not used: "
            + ", ".join(f"`{dotted((*path, key))}`" for key in dropped),
            stacklevel=2,
        )
