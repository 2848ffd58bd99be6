"""`sage policy prove`: whole clips of the embedded model on the baseline, each kernel, a policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin import files
from sage_plugin.cli import output_folder
from sage_plugin.cli.clips import ClipOptions, checked_policy, labels
from sage_plugin.cli.console import progress, say, stdout
from sage_plugin.cli.options import (
    ConfigDir,
    Device,
    Kernels,
    flattened,
    named_kernels,
    shown_first,
)
from sage_plugin.demo.sizes import SIZES

if TYPE_CHECKING:
    import torch

    from sage_plugin.bench.clips.record import ClipComparison

FOLDER = Path("policy_bench")
MARKER = ".sage-policy-bench"

PolicyOf = Annotated[str, typer.Argument(metavar="POLICY", help="File of rules, or a preset.")]
Budget = Annotated[
    float | None, typer.Option(min=0, help="Seconds for timing whole clips (default 60).")
]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder for the comparison.")]


EXAMPLES = ("sage policy prove balanced", "sage policy prove policy.json --kernel sage --digit 3")


@shown_first("kernel", "digit", "out")
@flattened
def command(
    policy: PolicyOf,
    clip: ClipOptions,
    kernel: Kernels = None,
    budget: Budget = None,
    out: Out = FOLDER,
    device: Device = None,
    config_dir: ConfigDir = None,
) -> None:
    """Draw whole clips on the baseline, each kernel and a policy: time, PSNR, SSIM."""
    from sage_plugin import device as devices

    where, facts = devices.chosen(device)
    kernels = labels(named_kernels(kernel or (), facts))
    run(policy, kernels, clip, where, config_dir, budget, out)


def run(
    policy_name: str,
    kernels: tuple[str, ...],
    clip: ClipOptions,
    device: torch.device,
    config_dir: Path | None,
    budget_s: float | None,
    out: Path,
) -> None:
    """Draw, compare, time, show and write.

    Raises:
        UsageError: the policy is of another model, or the output folder is not of this command.
        ConfigError: the policy is not sound, or names no layer of the model.
    """
    from sage_plugin import device as devices
    from sage_plugin.bench.clips import plot
    from sage_plugin.bench.clips.record import json_text
    from sage_plugin.bench.clips.rounds import LIMITS
    from sage_plugin.bench.clips.run import compare_clips
    from sage_plugin.bench.clips.run_config import run_configs
    from sage_plugin.cli.clip_table import render
    from sage_plugin.demo.film import save_comparison

    policy = checked_policy(policy_name)
    configs, name = run_configs(kernels, policy), clip.size_on(device)
    size, predicted = SIZES[name], policy.prediction
    steps = clip.num_inference_steps or (predicted and predicted.steps) or size.default_steps
    with progress("loading the model") as report:
        subject = clip.subject(device, steps, config_dir)
        subject.denoisers(configs)  # refuses a policy that does not fit, the old folder unchanged
        output_folder.prepare(out, marker=MARKER, command="sage policy prove")
        limits = LIMITS if budget_s is None else replace(LIMITS, budget_s=budget_s)
        comparison, _ = compare_clips(
            subject,
            configs,
            limits=limits,
            seed=clip.seed,
            report_progress=report,
            on_clip=lambda clips: save_comparison(
                {one: frames[: size.frames] for one, frames in clips.items()}, out / "side_by_side"
            ),
        )
    stdout.print(render(comparison, width=stdout.width), soft_wrap=False)
    note = plot.save(comparison, out / "plane.png")
    facts = {
        "policy": policy_name,
        "size": name,
        "digits": list(clip.digits),
        "steps": steps,
        "seed": clip.seed,
        "device": devices.facts(device).to_json(),
        "toolchain": devices.toolchain().to_json(),
    }
    files.write_atomically(out / "result.json", json_text(comparison, facts))
    wrote = f"Wrote result.json, the plot and the clips side by side to {out}."
    say(*filter(None, (note, wrote, _advice(policy_name, out, comparison))), to_stderr=True)


def _advice(policy: str, out: Path, comparison: ClipComparison) -> str:
    """What to do next."""
    if not comparison.stamp:
        return f"Next: look at {out / 'side_by_side.gif'}, and prove the policy on a GPU"
    gain = comparison.gain_over_front_db
    if gain is not None and gain < 0:
        return "Next: sage policy search, to search one that is worth more than a single kernel"
    return f"Next: sage_plugin.patch(pipe, policy={policy!r})"
