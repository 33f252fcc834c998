"""Keys of earlier designs of the configuration, and what takes the place of each.

In: the plain tables of a file and its overrides. Out: the retired keys among them, each with a sentence on what to write
instead. `config.load` takes them out and reports each by its exact key, before the tables are read as sections.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxrl.config.schema import KeyPath, dotted

_ALGO_TABLES = ("orchestrator.algo", "orchestrator.train.env.N.algo", "orchestrator.eval.env.N.algo")

_GRPO = "credit as reward minus the group's mean is `ALGO.type`='grpo'"
_NO_STD = "nothing is divided by the group's standard deviation; `ALGO.type`='grpo' subtracts its mean, 'max_rl' also divides by the mean"
_NO_ADVANTAGE = "the algorithms without advantages are `ALGO.type`='sft', 'opd' and 'opsd'"
_BY_ROLE = "which of the environment's messages are trained on is said by role: `ALGO.roles` of 'echo'"

_IN_ALGO = {
    "advantage": "how credit is given is the algorithm itself, `ALGO.type`; its settings stand beside that",
    "advantage='default'": _GRPO,
    "advantage='group_norm'": _NO_STD,
    "advantage='none'": _NO_ADVANTAGE,
    "advantage.type='default'": _GRPO,
    "advantage.type='group_norm'": _NO_STD,
    "advantage.type='none'": _NO_ADVANTAGE,
    "type='default'": _GRPO,
    "type='group_norm'": _NO_STD,
    "type='none'": _NO_ADVANTAGE,
    "name": "the algorithm is chosen by `ALGO.type`",
    "loss": "an algorithm feeds the loss component that fits it; the form of the policy gradient is `trainer.loss`, and how much each "
    "component counts are an environment's `coefficients`",
    "model": "a frozen model stands where it is used: `ALGO.teacher` of 'opd', `ALGO.sampling.source` of 'sft'",
    "token_scorer": "a model that scores tokens is a teacher: `ALGO.type`='opd' with `ALGO.teacher`, or 'opsd', where the policy is",
    "observations": _BY_ROLE,
    "observation_weight": f"{_BY_ROLE}; the weight of a role is its `alpha`",
}

RETIRED = {
    "orchestrator.training_mode": "a mode is an algorithm: `orchestrator.algo.type`, or `algo.type` of one environment",
    "orchestrator.teacher": "a teacher stands with the algorithm that asks it: `orchestrator.algo.teacher`, of the algorithm 'opd'",
    "orchestrator.policy": "the policy is `orchestrator.model`",
    "orchestrator.student": "the policy, which learns, is `orchestrator.model`",
    "orchestrator.client": "how the policy's servers are reached stands with the policy: `orchestrator.model.client`",
    "orchestrator.model.model": "the policy's settings stand in `orchestrator.model` itself, its name as `orchestrator.model.name`",
} | {f"{table}.{key}": hint for table in _ALGO_TABLES for key, hint in _IN_ALGO.items()}
"""Key, or key='value' where only that value is retired -> what to write instead. In a key `N` stands for a list index, in a
sentence `ALGO` for the algorithm's table in which the key was found."""


class RetiredKey(NamedTuple):
    """A retired key that a configuration has."""

    path: KeyPath
    """Where it stands."""
    shown: str
    """The key, and its value where only that is retired."""
    hint: str
    """What to write instead."""


def take_retired(tables: Any, path: KeyPath = ()) -> list[RetiredKey]:
    """Take the retired keys out of plain tables, and return them; a retired `type` takes its whole table along.

    Args:
      tables: a table or a list of tables; changed in place.
      path: where it stands.

    Example:
      >>> tables = {"orchestrator": {"group_size": 8, "student": {"name": "m"}}}
      >>> [(key.shown, key.hint) for key in take_retired(tables)], tables
      ([('`orchestrator.student`', 'the policy, which learns, is `orchestrator.model`')], {'orchestrator': {'group_size': 8}})
    """
    found = []
    for step, value in list(enumerate(tables)) if isinstance(tables, list) else list(tables.items()):
        if step == "type":
            continue  # judged with its table
        here = (*path, step)
        retired = _look_up(here, value)
        if retired is not None:
            found.append(retired)
            del tables[step]
        if isinstance(value, dict | list):
            found += take_retired(value, here)
    return found


def _look_up(path: KeyPath, value: Any) -> RetiredKey | None:
    """Return what is retired at a path: a table by its `type`, a key by its value, or a key whatever it holds."""
    key = ".".join("N" if isinstance(step, int) else step.replace("-", "_") for step in path)
    tag = value.get("type") if isinstance(value, dict) else None
    for suffix in (f".type={tag!r}", f"={value!r}", ""):
        if key + suffix in RETIRED:
            own_key, equals, own_value = suffix.partition("=")
            where = (*path, "type") if own_key else path
            algo = dotted(path[: path.index("algo") + 1]) if "algo" in path else ""
            return RetiredKey(where, f"`{dotted(where)}`{equals}{own_value}", RETIRED[key + suffix].replace("ALGO", algo))
    return None
