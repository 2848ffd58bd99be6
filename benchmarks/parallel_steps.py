"""A denoising step with its sequence over several GPUs, unpatched and patched, beside one GPU.

    torchrun --nproc-per-node 2 benchmarks/parallel_steps.py --output parallel_steps.json
        [--models cogvideox-2b,wan-1.3b] [--kernels auto+auto] [--layers 6] [--rounds 8] [--tiny]

Weights and inputs are random, and the same in each process. Every variant runs on a copy of its
own: on one GPU (each process alone), by Ulysses, and as a ring. Unpatched, a ring takes cuDNN's
attention, since torch's own gives no log-sum-exp. Errors are those of the whole output, beside the
unpatched model on one GPU.
"""

from __future__ import annotations

import copy
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import parallel_run
import step_models
import torch
from accuracy import identity, write
from diffusers.models.attention_dispatch import AttentionBackendName
from gpu_options import gpu_parser, on_gpu
from parallel_run import Place
from spread_cogvideox import SpreadProcessor, spread
from step_models import RandomStep
from step_times import kernels_and_linears, models
from step_timing import sharing_copy
from torch import nn

import sage_plugin
from sage_plugin.plugin.patch import PatchHandle

Facts = dict[str, Any]
UNPATCHED = "unpatched"
ONE_GPU = "one GPU"
WAYS = ("ulysses", "ring")


def measured(name: str, args: Any, at: Place) -> Facts:  # noqa: ANN401
    """Rows of one model."""
    step = step_models.build(name, at.device, tiny=args.tiny, layers=args.layers)
    if name.startswith("cogvideox"):
        step.model.set_attn_processor(SpreadProcessor())
    keep_magnitudes(step.model)
    rows: list[Facts] = []
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    exact = None
    for kernel in (UNPATCHED, *args.kernels):
        for way in (ONE_GPU, *(WAYS if at.world > 1 else ())):
            model, handle = _variant(step.model, kernel, way, at, min_seq=16 if args.tiny else 1024)
            run = _step(model, step)
            refused = _refusal(run) if kernel == UNPATCHED and way == "ring" else None
            if refused is not None:
                print(f"{name}, {way}: {refused}", file=sys.stderr, flush=True)
                continue
            run()
            before = _counts(handle)
            out = run()
            exact = out if exact is None else exact
            steps[f"{kernel}, {way}"] = run
            error, ran = parallel_run.relative_l1(out, exact), dict(_counts(handle) - before)
            rows.append({"kernel": kernel, "way": way, "error": error, "ran": ran})
    times = parallel_run.timed(steps, at, args.rounds)
    base = times[f"{UNPATCHED}, {ONE_GPU}"].median_ms
    for row in rows:
        time = times[f"{row['kernel']}, {row['way']}"]
        row |= {"time": time.to_json(), "ratio": base / time.median_ms}
    return {"model": name, "tokens": step.tokens, "config": step.config, "rows": rows}


def keep_magnitudes(model: nn.Module) -> None:
    """Scale the weights of linears so that outputs are as large as inputs, and errors show.

    Example:
        >>> linear = nn.Linear(64, 64)
        >>> keep_magnitudes(linear)
        >>> 0.1 < float(linear.weight.std()) < 0.15
        True
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.data
            weight.mul_(1.0 / (weight.float().std() * weight.shape[1] ** 0.5).to(weight.dtype))


def _variant(
    model: nn.Module, kernel: str, way: str, at: Place, *, min_seq: int
) -> tuple[nn.Module, PatchHandle | None]:
    """A copy of a model on a kernel, spread or not."""
    attention, _, linears = kernel.partition("+")
    twin = copy.deepcopy(model) if linears else sharing_copy(model)
    if way == "ring" and kernel == UNPATCHED:
        for processor in twin.attn_processors.values():
            processor._attention_backend = AttentionBackendName._NATIVE_CUDNN
    handle = None
    if kernel != UNPATCHED:
        options: Facts = {"linears": linears, "keep_originals": False} if linears else {}
        handle = sage_plugin.patch(twin, kernel=attention, min_seq=min_seq, **options)
    if way != ONE_GPU:
        spread(twin, way, at.world)
    return twin, handle


def _step(model: nn.Module, step: RandomStep) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        with torch.no_grad():
            out = model(**step.arguments)[0]
            return getattr(out, "wait", lambda: out)()

    return run


def _refusal(run: Callable[[], torch.Tensor]) -> str | None:
    """Why diffusers' own ring cannot run here, which all processes find alike; `None` if it can."""
    try:
        run()
    except (RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return None


def _counts(handle: PatchHandle | None) -> Counter[str]:
    """Calls by what they ran on."""
    ran: Counter[str] = Counter()
    if handle is not None:
        report = handle.report()
        for row in (*report.rows, *report.linears):
            ran.update(row.calls)
            ran.update({f"fallback: {reason}": count for reason, count in row.fallbacks.items()})
    return ran


def lines_of(facts: Facts) -> list[str]:
    """The rows of a model as text."""
    lines = [f"{facts['model']}: {facts['tokens']} tokens"]
    for row in facts["rows"]:
        low, high = row["time"]["low_ms"], row["time"]["high_ms"]
        lines.append(
            f"  {row['kernel']:18} {row['way']:8} {row['time']['median_ms']:9.2f} ms "
            f"({low:.2f} to {high:.2f})  x{row['ratio']:.3f}  error {row['error']:.5f}  "
            + ", ".join(f"{label} x{n}" for label, n in row["ran"].items())
        )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write in the first process; a model that fails costs its own rows alone."""
    parser = gpu_parser(__doc__)
    add = parser.add_argument
    add("--models", type=models, default=["cogvideox-2b", "wan-1.3b"])
    add("--kernels", type=kernels_and_linears, default=["auto+auto"],
        help="kernels of attention, each with +KERNEL for the linears too")  # fmt: skip
    add("--layers", type=int, help="at most so many blocks")
    add("--rounds", type=int, default=8, help="how often each step is timed")
    add("--tiny", action="store_true", help="tiny models, for CPUs")
    args = parser.parse_args(argv)
    on_gpu(parser, args, "a full-size step takes minutes on a CPU; try --tiny there")
    with parallel_run.place() as at:
        return _run(args, at)


def _run(args: Any, at: Place) -> int:  # noqa: ANN401
    rows, failed = [], []
    for name in args.models:
        try:
            rows.append(measured(name, args, at))
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {error}")
            print(failed[-1], file=sys.stderr, flush=True)
            if at.world > 1:  # the others may wait for this one
                os._exit(1)
        if at.rank == 0:
            print(*(lines_of(rows[-1]) if rows else ()), sep="\n", flush=True)
            facts = identity(str(at.device), args.commit)
            write(Path(args.output), facts | {"gpus": at.world, "models": rows, "failed": failed})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
