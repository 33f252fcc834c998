"""What a check found: one line for a person, and whether the run may go on with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import StrEnum


class Level(StrEnum):
    """How a finding is marked."""

    GOOD = "ok"
    """As it should be."""
    SKIPPED = "skip"
    """Not looked at: what it needs is wrong, as another check has told."""
    WARNING = "warn"
    """The run works, but something is worth knowing or changing."""
    BAD = "FAIL"
    """The run would fail, or train on something wrong."""


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    level: Level
    """How bad it is."""
    text: str
    """One line: figures, and what to do if it is not good."""

    @property
    def is_good(self) -> bool:
        """True unless the check failed."""
        return self.level is not Level.BAD


def good(text: str) -> Finding:
    """Return a finding that is as it should be."""
    return Finding(Level.GOOD, text)


def warning(text: str) -> Finding:
    """Return a finding that does not stop a run."""
    return Finding(Level.WARNING, text)


def bad(text: str) -> Finding:
    """Return a finding that does."""
    return Finding(Level.BAD, text)


def verdict(text: str, problems: list[str], remarks: list[str]) -> Finding:
    """Return what follows from a check's figures, the problems that it found and what else is worth knowing.

    Example:
      >>> verdict("3 stop ids", [], ["one is unused"])
      Finding(level=<Level.WARNING: 'warn'>, text='3 stop ids; one is unused')
    """
    level = Level.BAD if problems else Level.WARNING if remarks else Level.GOOD
    return Finding(level, "; ".join([text, *problems, *remarks]))


def joined(findings: Sequence[Finding]) -> Finding:
    """Return several findings of one check as one: those that are not good, or else all of them.

    Example:
      >>> joined([good("a"), warning("b"), bad("c")])
      Finding(level=<Level.BAD: 'FAIL'>, text='b; c')
      >>> joined([good("a"), good("b")])
      Finding(level=<Level.GOOD: 'ok'>, text='a; b')
    """
    shown = [finding for finding in findings if finding.level is not Level.GOOD] or findings
    return Finding(max((finding.level for finding in shown), key=list(Level).index), "; ".join(finding.text for finding in shown))
