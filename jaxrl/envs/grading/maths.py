"""The reward `math_verify`: whether a reply's final answer is mathematically the right one, by the package `math-verify`.

It is called in worker processes and nowhere else, because simplifying an expression may take for ever. The package's
own time limits rest on an alarm signal and are switched off; the deadline of the process rules.
"""

from __future__ import annotations

from typing import Any

from jaxrl.envs.answers import extract_answer
from jaxrl.envs.base import TaskSpec

MARKS = ("$", r"\boxed", r"\(", r"\[")
"""What sets mathematics apart from words."""


def math_verify_score(spec: TaskSpec, text: str) -> float:
    r"""Return 1 if the reply's answer equals the spec's `answer` mathematically, else 0, also if no mathematics is found.

    Of the reply counts what follows the last `</think>`; there, an expression in `\boxed{}` comes first, then those
    between dollar signs, then plain numbers. A reply in which none is found is taken for one expression as a whole, and
    so is an `answer` without such marks.

    Raises:
      ValueError: the spec's `answer` is no mathematics.
    """
    from math_verify import verify

    right = _parsed(_marked(str(spec.get("answer") or "")))
    if not right:
        raise ValueError(f"the task's `answer` {spec.get('answer')!r} cannot be read as mathematics")
    answer = extract_answer(text)
    reply = _parsed(answer) or _parsed(_marked(answer))
    return float(bool(reply) and verify(right, reply, timeout_seconds=None))


def _marked(text: str) -> str:
    return text if any(mark in text for mark in MARKS) else f"${text}$"


def _parsed(text: str) -> list[Any]:
    """Return what the package reads in a text: expressions of sympy; nothing where it finds words alone."""
    from math_verify import parse

    found = parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return found if any(not isinstance(part, str) for part in found) else []
