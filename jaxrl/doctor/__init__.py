"""`python -m jaxrl.doctor --config FILE.toml [--check NAME ...]`: look a run over before it costs anything.

Runs the checks in order, from those that need no device to those that play and train a little, and prints a line for each:
what was found, and what to do if it is not good. A check that needs what another one found wrong is skipped. It writes no
run folder: `--check resume`, which trains a few steps, works in a temporary one.
Exit code: 0 all good (warnings included), 1 a check failed, 2 the configuration cannot be loaded.
"""

from jaxrl.doctor.command import CHECKS, DEFAULT_CHECKS, main

__all__ = ["CHECKS", "DEFAULT_CHECKS", "main"]
