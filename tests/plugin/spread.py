"""Processes that run a tiny model with its sequence spread over them, and what came out."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import sage_plugin

MODELS = ("wan", "flux")
WORLD = 2


@dataclass(frozen=True)
class Run:
    """One forward on all processes: model, kernel (`""` for unpatched), way, where.

    Attributes:
        raises: the forward is expected to raise, and its text is kept.
    """

    model: str
    kernel: str
    way: str
    raises: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}-{self.kernel or 'unpatched'}-{self.way}"


def build(model: str, device: str = "cpu", dtype: torch.dtype = torch.float32, scale: int = 1):
    """A tiny model whose sequence two devices can share, and the arguments of a forward."""
    import diffusers

    torch.manual_seed(0)
    if model == "wan":
        network = diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=32, in_channels=4,
            out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2,
            cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
        )  # fmt: skip
        arguments = {
            "hidden_states": torch.randn(1, 4, 4, 8 * scale, 8 * scale),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": torch.randn(1, 12, 16),
        }
    else:
        network = diffusers.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=32,
            num_attention_heads=4, joint_attention_dim=32, pooled_projection_dim=32,
            axes_dims_rope=[8, 8, 16],
        )  # fmt: skip
        side = 8 * scale
        arguments = {
            "hidden_states": torch.randn(1, side * side, 4),
            "encoder_hidden_states": torch.randn(1, 16, 32),
            "pooled_projections": torch.randn(1, 32),
            "timestep": torch.tensor([0.5]),
            "img_ids": torch.cartesian_prod(
                torch.zeros(1), torch.arange(side).float(), torch.arange(side).float()
            ),
            "txt_ids": torch.zeros(16, 3),
        }
    cast = {k: t.to(device, dtype if t.is_floating_point() else None) for k, t in arguments.items()}
    return network.eval().to(device, dtype), cast


def forward(network, arguments):
    with torch.no_grad():
        return network(**arguments, return_dict=False)[0]


def results(runs: list[Run], folder: Path, *, gpus: bool = False) -> dict[str, list]:
    """What each process got in each run: `(output, report rows, error text)`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_process, (runs, str(folder), port, gpus), WORLD)
    return {
        run.name: [_read(folder / f"{run.name}-{rank}") for rank in range(WORLD)] for run in runs
    }


def _write(path: Path, out: torch.Tensor | None, rows: list, error: str) -> None:
    save_file({} if out is None else {"out": out.contiguous()}, path.with_suffix(".safetensors"))
    path.with_suffix(".json").write_text(json.dumps([rows, error]))


def _read(path: Path) -> tuple[torch.Tensor | None, list, str]:
    out = load_file(path.with_suffix(".safetensors")).get("out")
    return (out, *json.loads(path.with_suffix(".json").read_text()))


def _process(rank: int, runs: list[Run], folder: str, port: int, gpus: bool) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
                   "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank)}  # fmt: skip
    torch.set_num_threads(1)
    if gpus:
        torch.cuda.set_device(rank)
    else:
        torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    torch.distributed.init_process_group("nccl" if gpus else "gloo", rank=rank, world_size=WORLD)
    for run in runs:
        _write(Path(folder) / f"{run.name}-{rank}", *_one(run, gpus, rank))
    torch.distributed.destroy_process_group()


def _one(run: Run, gpus: bool, rank: int) -> tuple:
    from diffusers import ContextParallelConfig

    where = (f"cuda:{rank}", torch.bfloat16, 6) if gpus else ()
    network, arguments = build(run.model, *where)
    if run.kernel:
        sage_plugin.patch(network, kernel=run.kernel, min_seq=32)
    network.enable_parallelism(config=ContextParallelConfig(**{f"{run.way}_degree": WORLD}))
    out, error = None, ""
    try:
        out = (forward(network, arguments) + 0).cpu()  # a tensor that waits for its peers
    except ValueError as problem:
        if not run.raises:
            raise
        error = str(problem)
    rows = [] if not run.kernel else [
        (row.layer, row.calls, {str(why): n for why, n in row.fallbacks.items()})
        for row in sage_plugin.report(network).rows
    ]  # fmt: skip
    return out, rows, error
