"""The two consoles of the command line: data goes to stdout, progress and errors to stderr."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

from rich.console import Console

stdout = Console(highlight=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def say(*sentences: str, to_stderr: bool = False, style: str | None = None) -> None:
    """Print sentences as they are, a line each, without wrapping."""
    for sentence in sentences:
        console = stderr if to_stderr else stdout
        console.print(sentence, markup=False, highlight=False, soft_wrap=True, style=style)


def say_left_out(reasons: tuple[str, ...] | list[str]) -> None:
    """Print on stderr what was left out, and why."""
    say(*(f"left out: {reason}" for reason in reasons), to_stderr=True, style="yellow")


def fail(error: BaseException) -> None:
    """Print what went wrong, in one sentence on stderr."""
    say(f"error: {error}", to_stderr=True, style="bold red")


@contextlib.contextmanager
def progress(words: str = "") -> Iterator[Callable[[str], None]]:
    """Show a line on stderr while something runs; yields what changes its words."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    with Progress(
        SpinnerColumn(), text, TimeElapsedColumn(), console=stderr, transient=True
    ) as line:
        task = line.add_task(words, total=None)
        yield lambda words: line.update(task, description=words)


@contextlib.contextmanager
def counted(words: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a line with a count on stderr; yields what advances it by one."""
    with progress(f"{words} (0 of {total})") as report:
        numbers = itertools.count(1)
        yield lambda *_, **__: report(f"{words} ({next(numbers)} of {total})")
