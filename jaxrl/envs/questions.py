"""Questions from files, JSONL or Parquet: in each row a question, its answer and, if there is one, a reply to learn from.

In: files and the names of their columns. Out: a single-turn environment whose specs hold the row: `question`, `answer`,
`demonstration`, `difficulty` and `group` under these names, every other column under its own, so that a reward function finds
what it needs. Only the question is ever shown to the policy. Files are read once, when the environment is built.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

from jaxrl.config.env import QuestionsEnvConfig, env_name
from jaxrl.config.reward import PythonRewardConfig
from jaxrl.envs.answers import exact_match
from jaxrl.envs.base import TaskSpec
from jaxrl.envs.rows import Place, read_files, shown
from jaxrl.envs.single_turn import SingleTurnEnvironment
from jaxrl.envs.splits import question_id, split_in_words, split_of
from jaxrl.errors import ConfigError

logger = logging.getLogger(__name__)

EXAMPLE = '{"question": "2 + 2 =", "answer": "4"}'
"""A row, for messages."""
MAX_SHOWN_REPEATS = 3
"""Pairs of rows that are one task which a message lists."""


def questions_environment(config: QuestionsEnvConfig) -> SingleTurnEnvironment:
    """Read the files, keep the questions of the split, and build the environment.

    Raises:
      ConfigError: a file cannot be read, a row is not what it should be (file and line are named), rows have one name, a key
        names no column, or the split is empty.
    """
    where = f"env {env_name(config)!r}: `path`={config.path!r}"
    specs: list[TaskSpec] = []
    place_of_id: dict[str, Place] = {}
    repeats: list[str] = []
    found: dict[str, None] = {}
    for place, row in _rows(config, where):
        found |= dict.fromkeys(row)
        spec = _spec(row, config, f"{where}, {place}")
        if (first := place_of_id.setdefault(spec["id"], place)) != place:
            repeats.append(f"{first.and_also(place)} {_same(spec, row, config)}")
        if config.split in ("all", split_of(spec["question"], config.heldout_frac)):
            specs.append(spec)
    if repeats:
        remedy = f"remove one of each pair, or give every row a name of its own under {config.id_key!r} (`id_key`)"
        raise ConfigError(f"{where}: {_listed(repeats)}; {remedy}")
    for name, key in _columns(config).items():
        if place_of_id and key not in found and key != name:
            raise ConfigError(f"{where}: no row has a column {key!r} (`{name}_key`); the columns are {', '.join(map(repr, found))}")
    if not specs:
        reason = f"none of its {len(place_of_id)} questions is in split {config.split!r} with `heldout_frac`={config.heldout_frac}"
        raise ConfigError(f"{where}: {reason if place_of_id else 'the file has no rows'}")
    _tell_split(config, len(specs), len(place_of_id))
    return SingleTurnEnvironment(
        env_name(config),
        specs[: config.num_tasks],
        prompt=lambda spec: spec["question"],
        score=exact_match,
        system_prompt=config.system_prompt,
        examples=config.examples,
        require_stop=config.require_stop,
        demonstration=lambda spec: spec.get("demonstration"),
    )


def _tell_split(config: QuestionsEnvConfig, num_kept: int, num_questions: int) -> None:
    """Say how much of the file is asked: a warning where a part of it is left out that nobody asked to leave out."""
    told = split_in_words(num_kept, num_questions, config.split, config.heldout_frac)
    first = "" if config.num_tasks is None else f"; `num_tasks`={config.num_tasks} takes the first of them"
    if num_kept < num_questions and "split" not in config.model_fields_set:
        logger.warning("env %r: %s%s; `split` = 'all' takes the whole file", env_name(config), told, first)
    else:
        logger.info("env %r: %s%s", env_name(config), told, first)


def _rows(config: QuestionsEnvConfig, where: str) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield (place, row); a number in one of the known columns becomes the text that it is written as."""
    columns = _columns(config).values()
    for place, (_, line, row) in read_files(config.path, where, EXAMPLE):
        written = json.loads(line, parse_int=str, parse_float=str)
        yield place, {key: written[key] if key in columns and _is_number(value) else value for key, value in row.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _columns(config: QuestionsEnvConfig) -> dict[str, str]:
    """Return the file's name for each column that specs have a name for."""
    return {name: getattr(config, f"{name}_key") for name in ("id", "question", "answer", "demonstration", "difficulty", "group")}


def _spec(row: dict[str, Any], config: QuestionsEnvConfig, where: str) -> TaskSpec:
    columns = _columns(config)
    known = {name: _text(row, name, key, where) for name, key in columns.items()}
    if not (known["question"] or "").strip():
        raise ConfigError(f"{where}: no question under {columns['question']!r} (`question_key`); the row has {sorted(row)}")
    if not (known["answer"] or "").strip() and not isinstance(config.reward, PythonRewardConfig):
        raise ConfigError(
            f"{where}: no answer under {columns['answer']!r} (`answer_key`); the row has {sorted(row)}. Only a `reward` of type 'python' "
            "can do without"
        )
    # Which reply is learned from may change from run to run, so a file may hold several, one of them under that very name.
    rest = {key: value for key, value in row.items() if key not in (*columns.values(), "demonstration")}
    if clash := sorted(rest.keys() & known.keys()):
        name = clash[0]
        raise ConfigError(
            f"{where}: `{name}_key`={columns[name]!r} makes that column the task's {name!r}, and another one is called {name!r}, for which "
            "the task has no name left; rename that one in the file"
        )
    known["id"] = known["id"] or question_id(str(known["question"]))
    return {name: value for name, value in known.items() if value is not None} | rest


def _text(row: dict[str, Any], name: str, key: str, where: str) -> str | None:
    """Return a text of the row; None if there is none."""
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{where}: expected text or a number under {key!r} (`{name}_key`), got {shown(value)}")
    return value


def _same(spec: TaskSpec, row: dict[str, Any], config: QuestionsEnvConfig) -> str:
    return f"have one name, {spec['id']!r}" if row.get(config.id_key) is not None else f"ask one question, {spec['question'][:80]!r}"


def _listed(repeats: list[str]) -> str:
    more = len(repeats) - MAX_SHOWN_REPEATS
    return ", ".join(repeats[:MAX_SHOWN_REPEATS]) + (f", and {more} more such pair(s)" if more > 0 else "")
