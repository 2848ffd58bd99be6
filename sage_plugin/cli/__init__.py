"""`sage`: the command line. The only importer of typer and rich, and the only place that renders.

One file a command; each parses, calls the library and renders. An error that the library raises on
purpose becomes one sentence and its exit code here (docs/quickstart.md has the table of codes).
Commands import what they need when they run, so that `sage --help` is fast.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sage_plugin import __version__
from sage_plugin.cli import capture, configs, demo, doctor, policy, tune
from sage_plugin.cli.bench import command as bench
from sage_plugin.cli.console import fail, guarded, keep_numbers, stderr, stdout
from sage_plugin.cli.options import examples
from sage_plugin.errors import SageError


class SageGroup(TyperGroup):
    """A command group that turns errors of ours into a sentence and an exit code."""

    def make_context(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Read the words of the command line; the help and the version are printed here."""
        with _answered():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        """Run the command."""
        with _answered():
            return super().invoke(ctx)


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    try:
        with guarded():
            yield
    except SageError as error:
        fail(error)
        raise typer.Exit(error.exit_code) from error


app = typer.Typer(
    cls=SageGroup,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Quantised attention: record, tune, measure, and run a video model on the result.",
)
app.command("demo", epilog=examples(*demo.EXAMPLES))(demo.command)
app.command(
    "capture",
    epilog=examples(*capture.EXAMPLES),
    context_settings=capture.CONTEXT_SETTINGS,
)(capture.command)
app.command("tune", epilog=examples(*tune.EXAMPLES))(tune.command)
app.command("bench", epilog=examples(*bench.EXAMPLES))(bench.command)
app.command("doctor")(doctor.command)
app.add_typer(configs.app, name="configs")
app.add_typer(policy.app, name="policy")


def _version(asked: bool) -> None:
    if asked:
        stdout.print(f"sage_plugin {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
) -> None:
    """Set up logging: warnings, or everything with --verbose, on stderr."""
    from rich.logging import RichHandler

    handler = RichHandler(console=stderr, show_time=False, show_path=False)
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])


def main() -> None:
    """Entry point of `sage`, `sage-plugin` and `python -m sage_plugin`."""
    keep_numbers()
    sys.exit(app())


__all__ = ["app", "main", "stderr", "stdout"]
