"""`sage configs`: which tuned configs there are, are they sound, and how they get about."""

import typer

from sage_plugin.cli.configs import (
    check,
    diff,
    explain,
    export,
    listing,
    measuring,
    merging,
    regions,
)
from sage_plugin.cli.options import examples

app = typer.Typer(
    no_args_is_help=True,
    help="Tuned launch configs: list, explain, check, move, measure again, price.",
)
app.command("list")(listing.command)
app.command("explain", epilog=examples(explain.EXAMPLE))(explain.command)
app.command("check")(check.command)
app.command("diff")(diff.command)
app.command("apply")(merging.apply)
app.command("merge")(merging.merge)
app.command("regions")(regions.command)
app.command("revalidate")(measuring.revalidate)
app.command("export")(export.command)
app.command("import")(measuring.import_files)
