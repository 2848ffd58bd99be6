"""The two consoles of the command line: data goes to stdout, progress and errors to stderr."""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import itertools
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console as RichConsole

from sage_plugin.errors import OutputError, SageError

CLOSED_PIPE = 141
"""Exit code where nobody reads on, as of a program that SIGPIPE ends: 128 + 13."""

PLAIN = {"±": "+-", "×": "x", "…": "...", "–": "-", "→": "->", "≤": "<=", "≥": ">="}
"""What a terminal without such characters shows in their place."""


class Console(RichConsole):
    """A console that leaves what a closed pipe, or standard output, means to `guarded`."""

    def print(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401
        """Print as rich does, which takes a closed standard output for somebody who reads."""
        if not self.stderr:
            _check_open()
        super().print(*objects, **options)

    def on_broken_pipe(self) -> None:
        """Raise what rich caught."""
        raise BrokenPipeError


stdout = Console(highlight=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Let a command print to anything: few characters, a pipe that is closed, a full disk."""
    codecs.register_error("sage_plugin.plain", _in_plain_letters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="sage_plugin.plain")
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except SageError:
        raise
    except BrokenPipeError:
        _drop_stdout()
        raise SystemExit(CLOSED_PIPE) from None
    except SystemExit as end:  # of the console that typer prints help with
        closed = isinstance(end.__context__, BrokenPipeError)
        raise SystemExit(CLOSED_PIPE if closed else end.code) from None
    except OSError as error:
        _drop_stdout()
        what = error.filename or "standard output"
        raise OutputError(f"{what}: cannot be written ({error.strerror or error})") from None


def keep_numbers() -> None:
    """Keep the numbers of closed standard streams from files, into which others would print."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def _check_open() -> None:
    if sys.stdout is None:
        raise OSError(errno.EBADF, "it is closed")


def _drop_stdout() -> None:
    """Send the rest nowhere, so that the interpreter does not try to print it when it ends."""
    if sys.stdout is None:
        return
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(PLAIN.get(letter, "?") for letter in text), error.end


def command_line(*words: object) -> str:
    """Write a command of ours as a shell takes it.

    Example:
        >>> command_line("tune", "my captures")
        "sage tune 'my captures'"
    """
    return shlex.join(["sage", *map(str, words)])


def put(text: str) -> None:
    """Write a text to standard output as it is."""
    _check_open()
    sys.stdout.write(text)


def say(*sentences: str, to_stderr: bool = False, style: str | None = None) -> None:
    """Print sentences as they are, a line each, without wrapping."""
    for sentence in sentences:
        console = stderr if to_stderr else stdout
        console.print(sentence, markup=False, highlight=False, soft_wrap=True, style=style)


def say_left_out(reasons: tuple[str, ...] | list[str]) -> None:
    """Print on stderr what was left out, and why."""
    say(*(f"left out: {reason}" for reason in reasons), to_stderr=True, style="yellow")


def fail(error: BaseException) -> None:
    """Print what went wrong, in one sentence on stderr; a full one changes no exit code."""
    with contextlib.suppress(OSError):
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
