"""What `jaxrl eval` does: it reads what is asked, has it evaluated, shows what came of it, and says by its exit code how it went.

In: a command line. Out: tables or JSON on standard output, everything else on standard error, an exit code. What is asked is worked out in
`eval.request`, and the evaluation is `launch.evaluating`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxrl.config.eval_command import EvalCommandConfig
from jaxrl.config.eval_flags import build_eval_parser, parse_eval_flags
from jaxrl.config.load import take_overrides
from jaxrl.errors import ConfigError, EndpointDownError, EngineError, EnvUnreachableError, JaxrlError, ModelLoadError
from jaxrl.eval.request import read_request
from jaxrl.evals.book import EPISODES, PARTIAL
from jaxrl.evals.compare import Comparison, compare, comparison_lines
from jaxrl.evals.result import EvalResult
from jaxrl.interrupt import ended_by_ctrl_c
from jaxrl.launch.evaluating import EvalRequest, evaluate
from jaxrl.monitors.evaluation import EvalTerminal, print_scores
from jaxrl.monitors.messages import Messages, show_only_warnings

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_NOT_REPRODUCIBLE, EXIT_REGRESSION, EXIT_UNREACHABLE = range(6)

UNREACHABLE = ("EndpointDownError", "EnvUnreachableError")
"""What an episode fails with whose server is gone; it is played again when the evaluation goes on."""
PICTURE = "success_by_difficulty.png"


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate, and return the process's exit code.

    Args:
      argv: the command line without the program's name; None takes the process's own.

    Returns:
      One of those that `jaxrl.eval` names.
    """
    cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # the bar had hidden it
    with ended_by_ctrl_c(f"{cursor}Interrupted. The episodes that were played are kept: the same command goes on."):
        return _eval(list(sys.argv[1:] if argv is None else argv))


def _eval(argv: list[str]) -> int:
    messages, request = Messages(), None
    overrides, rest = take_overrides(argv, EvalCommandConfig)
    parser = build_eval_parser()
    flags = parse_eval_flags(rest, parser)
    show_only_warnings()
    terminal = EvalTerminal(messages.console)
    try:
        request = read_request(flags, overrides, messages.warn)
        with terminal.shown():
            result = evaluate(request, terminal)
        comparison = None if request.before is None else compare(request.before, result, force=request.is_forced)
    except (EndpointDownError, EnvUnreachableError) as error:
        is_own_engine = flags.checkpoint is not None and isinstance(error, EndpointDownError)
        messages.failure(f"{'The evaluation failed' if is_own_engine else 'Unreachable'}: {error}")
        _tell_how_to_go_on(messages, argv, request)
        return EXIT_FAILED if is_own_engine else EXIT_UNREACHABLE
    except (ConfigError, ModelLoadError, EngineError) as error:
        messages.configuration_error(error)
        return EXIT_USAGE
    except JaxrlError as error:
        messages.failure(f"The evaluation failed: {error}")
        _tell_how_to_go_on(messages, argv, request)
        return EXIT_FAILED
    _show(flags, request, result, comparison)
    return _exit_code(flags, request, result, comparison, messages, argv)


def _tell_how_to_go_on(messages: Messages, argv: Sequence[str], request: EvalRequest | None) -> None:
    has_rows = request is not None and any(_is_filled(request.output_dir / name) for name in (EPISODES, PARTIAL))
    kept = "What was played is kept." if has_rows else "Nothing was played yet."
    again = [token for token in argv if token != "--no-resume"]
    command = shlex.join([sys.executable, "-m", "jaxrl.eval", *again])
    messages.failure(f"{kept} Once that is mended, go on with: {command}")


def _is_filled(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def _show(flags: argparse.Namespace, request: EvalRequest, result: EvalResult, comparison: Comparison | None) -> None:
    """Print the result, in words or as JSON, and draw it."""
    # Only now: what draws takes half a second to import.
    from jaxrl.monitors.plot import draw_success_by_difficulty

    folder, title = request.output_dir, f"{request.dataset}: {request.parameters.model}"
    has_picture = draw_success_by_difficulty(result.scores, folder / PICTURE, title)
    if flags.json:
        value = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        value |= {"output_dir": str(folder), "comparison": None if comparison is None else dataclasses.asdict(comparison)}
        sys.stdout.write(json.dumps(value, ensure_ascii=True, allow_nan=False) + "\n")
        return
    console = Console(highlight=False)
    print_scores(console, result.scores, result.rows, title=title)
    if comparison is not None:
        console.print()
        console.print(f"compared with {flags.compare}", style="dim", markup=False, soft_wrap=True)
        for line in comparison_lines(comparison):
            console.print(line, markup=False, soft_wrap=True)
        if comparison.regressed:
            shown = shlex.join(["python", "-m", "jaxrl.rollouts", str(folder), "--task", comparison.regressed[0]])
            console.print(f"read one: {shown}", style="dim", markup=False, soft_wrap=True)
    console.print()
    files = f"{folder}: result.json, episodes.jsonl, timings.jsonl" + (f", {PICTURE}" if has_picture else "")
    console.print(files, style="dim", markup=False, soft_wrap=True)


def _exit_code(
    flags: argparse.Namespace,
    request: EvalRequest,
    result: EvalResult,
    comparison: Comparison | None,
    messages: Messages,
    argv: Sequence[str],
) -> int:
    """Return the exit code of an evaluation that came to its end, and say why it is not 0."""
    lost = [row for row in result.rows if row["error"] is not None and row["error"]["type"] in UNREACHABLE]
    if lost:
        messages.failure(f"Unreachable: {len(lost)} of {len(result.rows)} episodes met no server, the first: {lost[0]['error']['message']}")
        _tell_how_to_go_on(messages, argv, request)
        return EXIT_UNREACHABLE
    if not result.scores["n_scored"]:
        messages.failure("No episode was scored, so nothing was measured; see the errors in episodes.jsonl")
        return EXIT_FAILED
    if flags.require_reproducible and result.scores.get("reproducible") is not True:
        what = "was not reproducible" if result.scores.get("reproducible") is False else "could not be told to be reproducible"
        messages.failure(f"The evaluation {what} (--require-reproducible); `probes` in result.json say what differed")
        return EXIT_NOT_REPRODUCIBLE
    if flags.regression_p is not None:
        if comparison is not None and comparison.is_regression_below(flags.regression_p):
            told = f"{len(comparison.regressed)} tasks regressed and {len(comparison.fixed)} were fixed, p = {comparison.p_value:.3g}"
            messages.failure(f"The success rate fell: {told} (--regression-p {flags.regression_p:g})")
            return EXIT_REGRESSION
    elif flags.fail_on_regression and comparison is not None and comparison.is_regression:
        messages.failure(f"{len(comparison.regressed)} tasks regressed (--fail-on-regression)")
        return EXIT_REGRESSION
    return EXIT_OK
