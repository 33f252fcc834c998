"""A curriculum in one line: the share of the draws that each kind of task has, and how often it is solved.

In: a step's metrics by name. Out: a line for each environment whose task sampler tells kinds of tasks apart. It computes nothing: the
numbers are the sampler's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MAX_KINDS = 8
"""Kinds that a line names; of more, those with the largest shares."""

_KIND = re.compile(r"tasks/(?P<env>[^/]+)/(?:(?:key|pool)/)?(?P<kind>.+)/(?P<what>prob|p_hat)")


def kinds_in_words(values: Mapping[str, float]) -> list[str]:
    """Return a line for each environment with kinds of tasks: each kind with its share of the draws and its estimated success.

    Args:
      values: metrics by name; kinds are shown in the order in which they come.

    Example:
      >>> kinds_in_words({"tasks/sums/key/0/p_hat": 0.9, "tasks/sums/key/0/prob": 0.25, "tasks/sums/key/1/prob": 0.75})
      ['tasks of sums  0: 25% of draws, 0.90 solved; 1: 75%']
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, value in values.items():
        if match := _KIND.fullmatch(name):
            found.setdefault(match["env"], {}).setdefault(match["kind"], {})[match["what"]] = value
    return [line for env_name, kinds in found.items() if (line := _line(env_name, kinds))]


def _line(env_name: str, found: Mapping[str, Mapping[str, float]]) -> str:
    kinds = {kind: known for kind, known in found.items() if "prob" in known}
    largest = sorted(kinds, key=lambda kind: -kinds[kind]["prob"])[:MAX_KINDS]
    parts = []
    for kind in (kind for kind in kinds if kind in largest):
        share, solved = kinds[kind]["prob"], kinds[kind].get("p_hat")
        words = ("", "") if parts else (" of draws", " solved")
        parts.append(f"{kind}: {share:.0%}{words[0]}" + ("" if solved is None else f", {solved:.2f}{words[1]}"))
    if len(kinds) > len(parts):
        parts.append(f"{len(kinds) - len(parts)} more")
    return f"tasks of {env_name}  " + "; ".join(parts) if parts else ""
