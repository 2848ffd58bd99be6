"""`sage policy`: search the kernel of each layer and denoising step, prove it, weigh errors."""

import typer

from sage_plugin.cli.options import examples
from sage_plugin.cli.policy import prove as policy_prove
from sage_plugin.cli.policy import search as policy_search
from sage_plugin.cli.policy import sensitivity as policy_sensitivity
from sage_plugin.cli.policy import smoothing as policy_smoothing

app = typer.Typer(
    no_args_is_help=True, help="Kernels by layer and denoising step: search, prove, weigh, smooth."
)
for name, module in (
    ("search", policy_search),
    ("prove", policy_prove),
    ("sensitivity", policy_sensitivity),
    ("smoothing", policy_smoothing),
):
    app.command(name, epilog=examples(*module.EXAMPLES))(module.command)
