"""The console script: `jaxrl VERB ...` runs the entry point of that name, `python -m jaxrl.VERB ...`.

In: the command line. Out: the entry point's exit code: 0 ok, 1 it failed, 2 usage or configuration error. It
parses nothing but the verb, and imports an entry point only when it is asked for, so that help is instant.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

import jaxrl

VERBS = {
    "train": "train a policy: jaxrl train --config FILE.toml [--any.config.key VALUE ...] [--dry-run]",
    "eval": "measure a model on tasks: jaxrl eval ENV_SPEC (--llm-endpoint URL --model NAME | --checkpoint DIR) [--env.KEY VALUE ...]",
    "serve": "serve a model over HTTP: jaxrl serve --config FILE.toml [--any.config.key VALUE ...] [--dry-run]",
    "doctor": "check a configuration and this machine: jaxrl doctor --config FILE.toml [--check NAME]",
    "rollouts": "read the conversations of a run: jaxrl rollouts RUN_DIR [--step N] [--best | --worst | --errors]",
}
"""The entry points that exist, with a line of help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb.

    Args:
      argv: arguments without the program's name; None takes this process's own.

    Returns:
      The exit code.

    Example:
      >>> main(["--version"])
      jaxrl 0.1.0
      0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = arguments[0] if arguments else None
    if verb in VERBS:
        return importlib.import_module(f"jaxrl.{verb}").main(arguments[1:])
    if verb in ("--help", "-h", "help"):
        sys.stdout.write(_usage())
        return 0
    if verb == "--version":
        sys.stdout.write(f"jaxrl {jaxrl.__version__}\n")
        return 0
    if verb is None:
        sys.stderr.write(_usage())
        return 2
    near = difflib.get_close_matches(verb, VERBS, n=1)
    hint = f"did you mean `jaxrl {near[0]}`?" if near else f"the verbs are {', '.join(VERBS)}."
    sys.stderr.write(f"jaxrl: unknown verb {verb!r}; {hint}\n")
    return 2


def _usage() -> str:
    lines = [f"  {verb:<8} {line}" for verb, line in VERBS.items()]
    return "usage: jaxrl VERB [options]\n\n" + "\n".join(lines) + "\n\n`jaxrl VERB --help` tells more.\n"


if __name__ == "__main__":
    sys.exit(main())
