"""Logits of a language model whose linears are spread over GPUs, unpatched and patched.

    torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py --output tensor_parallel.json
        [--model mixtral] [--kernels auto+auto] [--layers 4] [--tokens 8192] [--rounds 8] [--tiny]

The model has random weights and the width of Llama 3.2 1B, or eight experts of half its
feed-forward layers; transformers spreads it by its own plan (`tp_plan="auto"`). A patched linear
quantizes the shard of its process, and a row-parallel one multiplies before its sum over processes.
Logits are compared with the unpatched model on one GPU.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import parallel_run
import torch
from accuracy import identity, write
from gpu_options import gpu_parser, on_gpu
from parallel_run import Place
from step_times import kernels_and_linears
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import sage_plugin

Facts = dict[str, Any]
UNPATCHED = "unpatched"
FULL: Facts = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
               "num_key_value_heads": 8, "vocab_size": 32000}  # fmt: skip
TINY: Facts = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
               "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
MORE: dict[str, tuple[Facts, Facts]] = {
    "llama": ({}, {}),
    "mixtral": (
        {"num_local_experts": 8, "intermediate_size": 4096},
        {"num_local_experts": 4, "intermediate_size": 64},
    ),
}
"""What a kind of model has beside, full-size and tiny."""
DTYPE = torch.bfloat16


def measured(args: Any, at: Place, folder: str) -> Facts:  # noqa: ANN401
    """Rows of the model that lies in a folder."""
    tokens = torch.arange(args.tokens, device=at.device).mul(7).remainder(61)[None]
    rows: list[Facts] = []
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    exact = None
    for kernel in (UNPATCHED, *args.kernels):
        for parts in (1, at.world):
            model = _loaded(folder, at, parts)
            attention, _, linears = kernel.partition("+")
            handle = None
            if kernel != UNPATCHED:
                handle = sage_plugin.patch(
                    model,
                    kernel=attention,
                    linears=linears or None,
                    min_seq=16 if args.tiny else 1024,
                )
            run = _forward(model, tokens)
            out = run()
            exact = out if exact is None else exact
            ran: Counter[str] = Counter()
            for row in () if handle is None else (*handle.report().rows, *handle.report().linears):
                ran.update(row.calls)
                ran.update({f"fallback: {why}": n for why, n in row.fallbacks.items()})
            same = (out.argmax(-1) == exact.argmax(-1)).float().mean()
            error = parallel_run.relative_l1(out, exact)
            steps[f"{kernel}, {parts}"] = run
            rows.append(
                {"kernel": kernel, "gpus": parts, "error": error, "same_token": float(same),
                 "ran": dict(ran)}
            )  # fmt: skip
    times = parallel_run.timed(steps, at, args.rounds)
    for row in rows:
        row["time"] = times[f"{row['kernel']}, {row['gpus']}"].to_json()
    return {"model": args.model, "layers": args.layers, "tokens": args.tokens, "rows": rows}


def _saved(folder: str, args: Any) -> None:  # noqa: ANN401
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        args.model, **((FULL, TINY)[args.tiny] | MORE[args.model][args.tiny]),
        num_hidden_layers=args.layers, max_position_embeddings=args.tokens,
        initializer_range=0.1 if args.tiny else 0.02,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).to(DTYPE).save_pretrained(folder)


def _loaded(folder: str, at: Place, parts: int) -> nn.Module:
    spread = {"tp_plan": "auto"} if parts > 1 else {}
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE, **spread)
    return (model if spread else model.to(at.device)).eval()


def _forward(model: nn.Module, tokens: torch.Tensor) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        with torch.no_grad():
            out: torch.Tensor = model(tokens).logits
            return getattr(out, "wait", lambda: out)()

    return run


def lines_of(facts: Facts) -> list[str]:
    """The rows as text."""
    return [
        f"  {row['kernel']:18} {row['gpus']} GPUs {row['time']['median_ms']:9.2f} ms  "
        f"error {row['error']:.5f}  same token {row['same_token']:.4f}  "
        + ", ".join(f"{label} x{n}" for label, n in row["ran"].items())
        for row in facts["rows"]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and write in the first process."""
    parser = gpu_parser(__doc__)
    add = parser.add_argument
    add("--kernels", type=kernels_and_linears, default=["auto+auto"],
        help="kernels of attention, each with +KERNEL for the linears too")  # fmt: skip
    add("--model", choices=tuple(MORE), default="llama", help="its kind")
    add("--layers", type=int, default=4, help="so many blocks")
    add("--tokens", type=int, default=8192, help="length of the prompt")
    add("--rounds", type=int, default=8, help="how often each forward is timed")
    add("--tiny", action="store_true", help="a tiny model, for CPUs")
    args = parser.parse_args(argv)
    on_gpu(parser, args, "a full-size forward takes minutes on a CPU; try --tiny there")
    with parallel_run.place() as at, tempfile.TemporaryDirectory() as own:
        folders = [own]
        torch.distributed.broadcast_object_list(folders)
        if at.rank == 0:
            _saved(own, args)
        torch.distributed.barrier()
        facts = measured(args, at, folders[0])
        if at.rank == 0:
            print(*lines_of(facts), sep="\n", flush=True)
            about = identity(str(at.device), args.commit)
            write(Path(args.output), about | {"gpus": at.world} | facts)
        torch.distributed.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
