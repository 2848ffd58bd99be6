"""`sage` as a user types it."""

from __future__ import annotations

import shlex

from click.testing import Result
from typer.testing import CliRunner

from sage_plugin.cli import app


def sage(*words: object) -> Result:
    """Run a command; what is no error of ours comes through as it was raised.

    One text alone is a command line, as in a shell.
    """
    line = shlex.split(words[0]) if len(words) == 1 and isinstance(words[0], str) else words
    result = CliRunner().invoke(app, [str(word) for word in line])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def error_of(result: Result) -> str:
    """The one sentence on stderr."""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")
