"""What `jaxrl eval ENV_SPEC` is asked for: the environment that a word such as `reasoning_gym:chain_sum` names, and who is measured.

In: words of a command line. Out: tables for `config.load`, which checks them and takes `--env.KEY VALUE` over them, and a root `Section`
to read them as. It parses no flag and reads no file.
"""

from __future__ import annotations

import difflib
import re
from typing import Any, NamedTuple

from jaxrl.config.base import IMPORT_PATH, Section
from jaxrl.config.dump import redact
from jaxrl.config.env import EnvBase, EnvConfig, PythonEnvConfig
from jaxrl.config.inference import EmbeddedInferenceConfig
from jaxrl.config.schema import section_types
from jaxrl.errors import ConfigError


class EvalCommandConfig(Section):
    """The part of `jaxrl eval` that is a configuration: each of its keys is a flag, such as `--env.num_tasks 100`."""

    env: EnvConfig
    """The environment that is played."""
    inference: EmbeddedInferenceConfig = EmbeddedInferenceConfig(num_slots=32, max_model_len=512, min_prefill_bucket=64)
    """The engine that a checkpoint is loaded into."""


class SpecKind(NamedTuple):
    """What the word before the colon of an ENV_SPEC stands for."""

    type: str
    """Type of the environment."""
    key: str
    """The setting that the rest of the spec is."""
    example: str
    """For help."""


SPEC_KINDS = {
    "reasoning_gym": SpecKind("reasoning_gym", "dataset", "chain_sum"),
    "tools": SpecKind("tools", "dataset", "chain_sum"),
    "feedback": SpecKind("feedback", "dataset", "chain_sum"),
    "questions": SpecKind("questions", "path", "test.jsonl"),
    "openenv": SpecKind("openenv", "base_url", "http://127.0.0.1:8000"),
    "verifiers": SpecKind("verifiers", "taskset", "my_taskset"),
    "py": SpecKind("python", "import_path", "my_package.worlds:make"),
    "agent": SpecKind("agent", "import_path", "my_package.agents:play"),
}
"""The kinds of ENV_SPEC, but for `config:FILE#NAME`, which is an environment of a run's configuration."""

CONFIG_KIND = "config"

LADDERS: dict[str, dict[str, dict[str, int]]] = {
    "chain_sum": {
        f"{terms}x{digits}": {"min_terms": terms, "max_terms": terms, "min_digits": digits, "max_digits": digits}
        for terms, digits in ((2, 1), (3, 1), (3, 2), (4, 2), (4, 3), (5, 3), (5, 4), (6, 4), (6, 5), (7, 5))
    }
}
"""Difficulties of datasets by name, ascending: `2x1` is a sum of two terms with one digit each."""

ALL_TIERS = "tiers"


def env_tables(spec: str) -> dict[str, Any]:
    """Return the table of the environment that an ENV_SPEC names; what it leaves out is the environment's own default.

    Raises:
      ConfigError: there is no such kind, or no such tier.

    Example:
      >>> env_tables("reasoning_gym:chain_sum")
      {'type': 'reasoning_gym', 'dataset': 'chain_sum'}
      >>> [tier["name"] for tier in env_tables("reasoning_gym:chain_sum@2x1,3x1")["tiers"]]
      ['2x1', '3x1']
    """
    word, colon, rest = spec.partition(":")
    kind = SPEC_KINDS.get(word)
    if kind is None or not colon or not rest:
        near = difflib.get_close_matches(word, [*SPEC_KINDS, CONFIG_KIND], n=1)
        hint = f"did you mean {near[0] + ':' + (rest or '...')!r}?" if near and near[0] != word else "such as " + ", ".join(examples())
        raise ConfigError(f"ENV_SPEC={spec!r}: expected a kind of environment, a colon and which one; {hint}")
    table: dict[str, Any] = {"type": kind.type, kind.key: rest}
    if kind.key == "dataset":
        dataset, at, tiers = rest.partition("@")
        table["dataset"] = dataset
        if at:
            table["tiers"] = _tiers(spec, dataset, tiers)
    if kind.key == "import_path" and not re.fullmatch(IMPORT_PATH, rest):
        raise ConfigError(f"ENV_SPEC={spec!r}: expected an import path such as '{word}:{kind.example}'")
    return table


def dataset_of(env: EnvBase) -> str:
    """Return the ENV_SPEC of an environment's tasks, without secrets; its type where no ENV_SPEC names it.

    Example:
      >>> from jaxrl.config.env import ReasoningGymEnvConfig, ReverseTextEnvConfig
      >>> dataset_of(ReasoningGymEnvConfig(dataset="chain_sum")), dataset_of(ReverseTextEnvConfig())
      ('reasoning_gym:chain_sum', 'reverse_text')
    """
    for word, kind in SPEC_KINDS.items():
        if kind.type == env.type:
            return f"{word}:{redact(getattr(env, kind.key))}"
    return env.type


def examples() -> list[str]:
    """Return an ENV_SPEC of each kind."""
    return [f"{word}:{kind.example}" for word, kind in SPEC_KINDS.items()]


def config_spec(spec: str) -> tuple[str, str] | None:
    """Return the file and the environment's name of `config:FILE#NAME`; the name is empty if there is none. None for another kind.

    Example:
      >>> config_spec("config:runs/a/config.toml#heldout"), config_spec("reasoning_gym:chain_sum")
      (('runs/a/config.toml', 'heldout'), None)
    """
    word, _, rest = spec.partition(":")
    if word != CONFIG_KIND or not rest:
        return None
    path, _, name = rest.partition("#")
    return path, name


def with_split(table: dict[str, Any], split: str | None) -> dict[str, Any]:
    """Return an environment's table with a split: the one asked for, or what is held out.

    `test` is `heldout` where the environment splits questions itself; a file of questions is taken whole unless a split is asked for.

    Raises:
      ConfigError: a split is asked for, and the environment has none.

    Example:
      >>> with_split({"type": "reasoning_gym"}, "test")["split"], with_split({"type": "openenv"}, None)["split"]
      ('heldout', 'test')
    """
    section = env_section(table["type"])
    if "split" not in section.model_fields:
        if split is not None:
            raise ConfigError(f"`--split` {split}: an environment of type {table['type']!r} has no splits; leave it out")
        return table
    if table["type"] == "openenv":
        return {**table, "split": split or "test"}
    default = "all" if table["type"] == "questions" else "heldout"
    return {**table, "split": "heldout" if split == "test" else split or default}


def env_section(kind: str) -> type[Section]:
    """Return the section class of a type of environment."""
    sections = {s.model_fields["type"].default: s for s in section_types(EvalCommandConfig.model_fields["env"].annotation)}
    return sections.get(kind, PythonEnvConfig)


def _tiers(spec: str, dataset: str, tiers: str) -> list[dict[str, Any]]:
    ladder = LADDERS.get(dataset)
    if ladder is None:
        raise ConfigError(
            f"ENV_SPEC={spec!r}: tiers are of {', '.join(LADDERS)} only; make some of {dataset!r} with `--env.tiers`, a list of tables"
        )
    names = list(ladder) if tiers == ALL_TIERS else tiers.split(",")
    if unknown := [name for name in names if name not in ladder]:
        raise ConfigError(f"ENV_SPEC={spec!r}: no tier {unknown[0]!r}; {dataset} has {', '.join(ladder)}, and '{ALL_TIERS}' is all of them")
    return [{"name": name, "parameters": ladder[name]} for name in names]
