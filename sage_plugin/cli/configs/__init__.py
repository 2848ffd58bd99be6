"""`sage configs`: which tuned configs there are, why a call gets its own, and are they sound."""

import typer

from sage_plugin.cli.configs import check, explain, listing

app = typer.Typer(no_args_is_help=True, help="Tuned launch configs: list, explain, check.")
app.command("list")(listing.command)
app.command("explain")(explain.command)
app.command("check")(check.command)
