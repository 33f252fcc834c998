"""The command: parse, run the checks in order, print a line for each, and return the exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from jaxrl.config.load import build_parser, load_config_aloud, parse_cli
from jaxrl.doctor.demonstrations import check_demonstrations
from jaxrl.doctor.endpoint import check_endpoint
from jaxrl.doctor.examination import Examination
from jaxrl.doctor.finding import Finding, Level
from jaxrl.doctor.memory import check_memory
from jaxrl.doctor.model import check_head, check_model
from jaxrl.doctor.parity import check_logprobs, check_parity
from jaxrl.doctor.resume import check_resume
from jaxrl.doctor.rewards import check_rewards
from jaxrl.doctor.seeds import check_seeds
from jaxrl.doctor.settings import check_budgets, check_config
from jaxrl.doctor.template import check_template
from jaxrl.doctor.tokenizer import check_tokenizer
from jaxrl.errors import ConfigError, JaxrlError
from jaxrl.monitors.messages import Messages

CHECKS: dict[str, Callable[[Examination], Finding]] = {
    "config": check_config,
    "tokenizer": check_tokenizer,
    "template": check_template,
    "budgets": check_budgets,
    "rewards": check_rewards,
    "demonstrations": check_demonstrations,
    "endpoint": check_endpoint,
    "head": check_head,
    "model": check_model,
    "memory": check_memory,
    "parity": check_parity,
    "logprobs": check_logprobs,
    "seeds": check_seeds,
    "resume": check_resume,
}
"""Every check by name, in the order in which they run: first what costs nothing."""

DEFAULT_CHECKS = tuple(name for name in CHECKS if name != "resume")
"""What runs without `--check`: everything but `resume`, which trains."""

_STYLES = {Level.GOOD: "green", Level.SKIPPED: "dim", Level.WARNING: "yellow", Level.BAD: "red"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks, print what they found, and return the process's exit code."""
    parser = build_parser("python -m jaxrl.doctor", "Look a run over before it costs anything.")
    parser.add_argument(
        "--check", action="append", choices=list(CHECKS), help="run this check only; may be given several times (default: all but `resume`)"
    )
    out, messages = Console(highlight=False), Messages()
    command = parse_cli(sys.argv[1:] if argv is None else argv, parser)
    try:
        config = load_config_aloud(command.path, command.overrides, messages.warn)
    except ConfigError as error:
        messages.configuration_error(error)
        return 2
    is_good = True
    told_by: dict[str, str] = {}
    with Examination(config) as exam:
        for name in command.flags.check or DEFAULT_CHECKS:
            finding = _look(name, exam, told_by)
            is_good &= finding.is_good
            out.print(f"{finding.level:4} {name:15}", style=_STYLES[finding.level], end="")
            out.print(finding.text, markup=False, soft_wrap=True)
    return 0 if is_good else 1


def _look(name: str, exam: Examination, told_by: dict[str, str]) -> Finding:
    """Run one check; what it cannot stand is told as well, so that the others still run.

    Args:
      name: the check.
      exam: the run.
      told_by: which check was the first to fail with an error; one that fails with the same needs the same and is skipped.
    """
    try:
        return CHECKS[name](exam)
    except Exception as raised:
        error: BaseException = raised
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = str(error) if isinstance(error, JaxrlError) else f"the check itself failed with {type(error).__name__}: {error}"
    first = told_by.setdefault(text, name)
    return Finding(Level.BAD, text) if first == name else Finding(Level.SKIPPED, f"it needs what failed in the check of {first}")
