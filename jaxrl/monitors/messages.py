"""What a command says on standard error: warnings, what is wrong with the configuration, why it failed.

In: words. Out: one paragraph each, in the command's one style. Exit codes are the command's own.
"""

from __future__ import annotations

import logging

from rich.console import Console


class Messages:
    """The standard error of a command."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)

    def warn(self, text: str) -> None:
        """Say what does not stop the command."""
        self._say(f"Warning: {text}", "yellow")

    def configuration_error(self, error: Exception) -> None:
        """Say what the user has to change."""
        self._say(f"Configuration error: {error}", "red")

    def failure(self, text: str) -> None:
        """Say why the command failed."""
        self._say(text, "red")

    def _say(self, text: str, style: str) -> None:
        self.console.print(text, style=style, markup=False, soft_wrap=True)


def show_only_warnings() -> None:
    """Keep INFO lines off the terminal; call it before any library is imported that would set up a handler of its own."""
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
