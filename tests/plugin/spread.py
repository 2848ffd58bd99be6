"""Processes that run a tiny model spread over them, and what came out.

Diffusers spreads sequences (`ulysses`, `ring`); transformers (`tp`) and torch (`shards`) linears.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

import sage_plugin
from sage_plugin.plugin.linears.layer import LinearLayer

MODELS = ("wan", "flux")
WORLD = 2
TP, SHARDS = "tp", "shards"
FUSED = "fused"
"""Among the calls of a row: those whose norm and rotary embedding were one kernel."""
MIN_SEQ = 32


@dataclass(frozen=True)
class Run:
    """One forward on all processes: model, kernel (`""` for unpatched), way.

    Attributes:
        linears: kernel of the linears, `""` where they are left.
        raises: the forward is expected to raise, and its text is kept.
    """

    model: str
    kernel: str
    way: str
    linears: str = ""
    raises: bool = False

    @property
    def name(self) -> str:
        kernels = f"{self.kernel or 'unpatched'}{self.linears and '+'}{self.linears}"
        return f"{self.model}-{kernels}-{self.way}"

    @property
    def options(self) -> dict:
        """The arguments of `patch`."""
        return {"kernel": self.kernel, "linears": self.linears or None, "min_seq": MIN_SEQ}


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
    network.eval().to(device, dtype)
    if model == "wan":  # angles stay in fp32, as they do where a model is loaded
        network.rope = type(network.rope)(32, (1, 2, 2), 64).to(device)
    return network, cast


def language_model():
    """A tiny Llama with biases, so that one that is added in each process shows."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=48, attention_bias=True, mlp_bias=True,
        initializer_range=0.2,
    )  # fmt: skip
    network = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return network


def mixture():
    """A tiny Mixtral."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=48, num_local_experts=4, initializer_range=0.2,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).eval()


LANGUAGE_MODELS = {"llama": language_model, "mixtral": mixture}


def sentence(device: str = "cpu") -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(40, device=device).mul(7).remainder(48)[None]}


def forward(network, arguments):
    with torch.no_grad():
        return network(**arguments, return_dict=False)[0]


def results(runs: list[Run], folder: Path, *, gpus: bool = False) -> dict[str, list]:
    """What each process got in each run: `(output, report rows, error text)`."""
    for model in {run.model for run in runs if run.way == TP}:
        LANGUAGE_MODELS[model]().save_pretrained(folder / model)
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
        of_linears = run.way in (TP, SHARDS)
        with mock.patch.object(LinearLayer, "_send_away", _waits if not gpus else SEND_AWAY):
            made = _tensor_parallel(run, folder, gpus) if of_linears else _one(run, gpus, rank)
        _write(Path(folder) / f"{run.name}-{rank}", *made)
    torch.distributed.destroy_process_group()


SEND_AWAY = LinearLayer._send_away


def _waits(layer: LinearLayer, weight: torch.Tensor) -> None:
    """Have an original wait elsewhere, as that of a GPU does."""
    weight.data, layer.waiting = weight.data.clone(), True


def _one(run: Run, gpus: bool, rank: int) -> tuple:
    from diffusers import ContextParallelConfig

    where = (f"cuda:{rank}", torch.bfloat16, 6) if gpus else ()
    network, arguments = build(run.model, *where)
    if run.kernel:
        sage_plugin.patch(network, **run.options)
    network.enable_parallelism(config=ContextParallelConfig(**{f"{run.way}_degree": WORLD}))
    out, error = None, ""
    try:
        out = (forward(network, arguments) + 0).cpu()  # a tensor that waits for its peers
    except ValueError as problem:
        if not run.raises:
            raise
        error = str(problem)
    return out, _rows(network) if run.kernel else [], error


def _tensor_parallel(run: Run, folder: str, gpus: bool) -> tuple:
    """The output of a model with spread linears, and what of it was not as it should be."""
    if run.way == TP:
        network, arguments = _by_transformers(f"{folder}/{run.model}", gpus)
    else:
        network, arguments = _by_torch(gpus)
    before = dict(network.named_parameters())
    plain, forwards = forward(network, arguments), _forwards(network)
    if not run.kernel:
        return plain.cpu(), [], ""
    sage_plugin.patch(network, **run.options)
    forward(network, arguments)  # it may be compared with what is not fused, and give that
    rows, out = _rows(network), forward(network, arguments)
    with_gradient = network(**arguments, return_dict=False)[0]
    again = forward(network, arguments)
    saved = {name: whole(value) for name, value in network.state_dict().items()}
    sage_plugin.unpatch(network)
    alike = [  # in every process; a patched model saves from CPU memory
        torch.equal(saved[name].cpu(), whole(before[name]).cpu()) for name in before
    ]
    as_it_should = {
        "with a gradient": float((with_gradient - plain).abs().max()) < (0.25 if gpus else 1e-4),
        "after a gradient": torch.equal(again, out),
        "saved": all(alike),
        "unpatched": torch.equal(forward(network, arguments), plain),
        "parameters": all(p is before[name] for name, p in network.named_parameters()),
        "forwards": _forwards(network) == forwards,
    }
    return out.cpu(), rows, ", ".join(what for what, fits in as_it_should.items() if not fits)


def _by_transformers(folder: str, gpus: bool) -> tuple:
    import transformers

    load = transformers.AutoModelForCausalLM.from_pretrained
    network = load(folder, tp_plan="auto", dtype=torch.bfloat16 if gpus else None)
    return network.eval(), sentence("cuda" if gpus else "cpu")


def _by_torch(gpus: bool) -> tuple:
    """Flux with the feed-forwards of a block sharded, as diffusers' `TensorParallelConfig` does."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    kind = "cuda" if gpus else "cpu"
    network, arguments = build("flux", *((kind, torch.bfloat16, 6) if gpus else ()))
    mesh = torch.distributed.init_device_mesh(kind, (WORLD,))
    for name in ("ff", "ff_context"):
        plan = {"net.0.proj": ColwiseParallel(), "net.2": RowwiseParallel()}
        parallelize_module(getattr(network.transformer_blocks[0], name), mesh, plan)
    return network, arguments


def whole(tensor):
    """A tensor that lies in parts, gathered."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _forwards(network) -> list:
    """The functions that stand in the place of forwards."""
    return [
        (name, vars(m)["forward"]) for name, m in network.named_modules() if "forward" in vars(m)
    ]


def _rows(network) -> list:
    report, counts = sage_plugin.report(network), []
    for row in (*report.rows, *report.linears):
        fused = {FUSED: n} if (n := getattr(row, FUSED, 0)) else {}
        why = {str(reason): n for reason, n in row.fallbacks.items()}
        counts.append((row.layer, row.calls | fused, why))
    return counts
