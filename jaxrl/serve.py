"""`python -m jaxrl.serve --config FILE.toml [--any.key VALUE ...]`: serve a model over HTTP, for OpenAI's client and for `inference`.

Parses, calls `launch.serving`, and turns the outcome into an exit code: 0 stopped on request, 1 the server failed, 2 the command
line, the configuration, the model directory or the address is wrong, 130 Ctrl-C before there was anything to stop. It builds
nothing itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console

from jaxrl.config.dump import dump_toml
from jaxrl.config.load import build_parser, load_config_aloud, parse_cli
from jaxrl.config.serve import ServeConfig
from jaxrl.errors import ConfigError, JaxrlError, ModelLoadError
from jaxrl.interrupt import ended_by_ctrl_c
from jaxrl.monitors.messages import Messages, show_only_warnings

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, and return the process's exit code.

    Args:
      argv: the command line without the program's name; None takes the process's own.

    Returns:
      0, 1 or 2, as the module says; on Ctrl-C outside of serving it does not return.
    """
    with ended_by_ctrl_c("Interrupted."):
        return _serve(sys.argv[1:] if argv is None else argv)


def _serve(argv: Sequence[str]) -> int:
    messages = Messages()

    parser = build_parser(
        "python -m jaxrl.serve",
        "Serve a model over HTTP.",
        examples="--server.port 8001, --inference.num_slots 32, --model.name models/mine",
        can_resume=False,
    )
    command = parse_cli(argv, parser, ServeConfig)
    try:
        config = load_config_aloud(command.path, command.overrides, messages.warn, ServeConfig)
    except ConfigError as error:
        messages.configuration_error(error)
        return EXIT_USAGE
    if command.flags.dry_run:
        sys.stdout.write(dump_toml(config))
        return EXIT_OK

    show_only_warnings()

    # JAX is imported only now, so that a wrong configuration fails before any device is touched.
    from jaxrl.launch import serving

    out = Console(highlight=False)
    try:
        serving.serve(config, lambda text: out.print(text, markup=False, soft_wrap=True))
    except (ConfigError, ModelLoadError) as error:
        messages.configuration_error(error)
        return EXIT_USAGE
    except JaxrlError as error:
        messages.failure(f"The server failed: {error}")
        return EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
