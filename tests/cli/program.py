"""`sage` as a user types it."""

from __future__ import annotations

import functools
import shlex

import click
import typer
from click.testing import CliRunner, Result

from sage_plugin.cli import app


@functools.cache
def program() -> click.Command:
    """All commands, built once: that takes ten times as long as to refuse a word of one."""
    return typer.main.get_command(app)


def sage(*words: object) -> Result:
    """Run a command; what is no error of ours comes through as it was raised.

    One text alone is a command line, as in a shell.
    """
    line = shlex.split(words[0]) if len(words) == 1 and isinstance(words[0], str) else words
    result = CliRunner().invoke(program(), [str(word) for word in line])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def error_of(result: Result) -> str:
    """The one sentence on stderr."""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")
