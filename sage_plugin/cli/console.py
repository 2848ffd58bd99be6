"""The two consoles of the command line: data goes to stdout, progress and errors to stderr."""

from __future__ import annotations

from rich.console import Console

stdout = Console(highlight=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(error: BaseException) -> None:
    """Say what went wrong, in one sentence on stderr."""
    stderr.print(f"error: {error}", style="bold red", markup=False)
