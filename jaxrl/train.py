"""`python -m jaxrl.train --config FILE.toml [--any.key VALUE ...]`: train a policy, or go on with `--resume RUN_DIR`.

Parses, calls `launch`, and turns the outcome into an exit code: 0 done (or stopped on request, with its state saved), 1 the
run failed, 2 the command line, the configuration or the model directory is wrong, 130 Ctrl-C while there was nothing to save, 143
likewise for SIGTERM. A run that failed shows the short form of its `crash.txt`. It builds nothing itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxrl.config.dump import dump_toml
from jaxrl.config.load import load_config_aloud, parse_cli
from jaxrl.errors import ConfigError, JaxrlError, ModelLoadError
from jaxrl.interrupt import ended_by_ctrl_c
from jaxrl.monitors.messages import Messages, show_only_warnings

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Train, and return the process's exit code.

    Args:
      argv: the command line without the program's name; None takes the process's own.

    Returns:
      0, 1 or 2, as the module says; on Ctrl-C outside of training it does not return.
    """
    with ended_by_ctrl_c("Interrupted outside of training; no step was lost."):
        return _train(sys.argv[1:] if argv is None else argv)


def _train(argv: Sequence[str]) -> int:
    messages = Messages()

    command = parse_cli(argv)
    try:
        config = load_config_aloud(command.path, command.overrides, messages.warn)
    except ConfigError as error:
        messages.configuration_error(error)
        return EXIT_USAGE
    if command.flags.resume is not None:
        # The folder that was named is the run, whatever its config.toml says: it may have been moved or copied.
        config = config.model_copy(update={"run": config.run.model_copy(update={"output_dir": str(command.flags.resume)})})
    if command.flags.dry_run:
        sys.stdout.write(dump_toml(config))
        return EXIT_OK

    show_only_warnings()

    # JAX is imported only now, so that a wrong configuration fails before any device is touched.
    from jaxrl.launch import launch
    from jaxrl.monitors import crash
    from jaxrl.monitors.terminal import LastingConsole

    try:
        outcome = launch(config, resume=command.flags.resume is not None)
    except (ConfigError, ModelLoadError) as error:
        messages.configuration_error(error)
        return EXIT_USAGE
    except Exception as error:
        report = crash.report_of(error)
        if report is None and not isinstance(error, JaxrlError):
            raise
        if report is None:
            messages.failure(f"The run failed: {error}")
            return EXIT_FAILED
        if not isinstance(error, JaxrlError):
            # The report's own traceback: Python's would show the secrets that the report leaves out.
            messages.console.print("\n".join(report["traceback"]), markup=False, soft_wrap=True)
        crash.show(report, messages.console)
        return EXIT_FAILED
    curve = outcome.run_dir / "reward_curve.png"
    parts = [f"run folder: {outcome.run_dir}", *([f"curve: {curve}"] if curve.is_file() else [])]
    LastingConsole(highlight=False).print("  ".join(parts), markup=False, soft_wrap=True)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
