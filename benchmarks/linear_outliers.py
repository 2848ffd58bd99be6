"""What rotation and smoothing of linears save on models with real weights.

Outputs of SmolLM2, MiniLM and Whisper's encoder with every linear in the blocks in 8 bits, plain,
with rotated and with smoothed input channels: relative L1 to the unpatched output, and SmolLM2's
perplexity. Factors of smoothing are recorded on the rest of SmolLM2's text, and of the others on
what they are judged on. Kernels are emulated on a CPU, exactly. Needs the weights of
`tests/real/requirements.txt`, and five minutes of one core.

    python benchmarks/linear_outliers.py --output benchmarks/results/linear_outliers.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from real_models import identity  # noqa: E402
from set_gates import rounded, say  # noqa: E402

from sage_plugin.capture.recording.recorder import record  # noqa: E402
from sage_plugin.capture.store.reader import open_captures  # noqa: E402
from sage_plugin.tune.policy.smoothing import smoothing_of, write  # noqa: E402
from tests.real import captured, inputs, linears, outputs  # noqa: E402

Row = dict[str, Any]
MODELS = ("smollm2", "minilm", "whisper")
KERNELS = ("int8_row", "fp8_row")
ROTATIONS = (0, 64, 256)
STRENGTH = 0.5


def factors(model: str, loaded: tuple[Any, Any], tokens: int, folder: Path) -> Path:
    """The file of smoothing factors of a model."""
    network, tokenizer = loaded
    options = {"max_captures": linears.EVERY, "max_bytes": 2**40, "rows": linears.ROWS}
    with record(network, folder / model, ops="linear", **options), torch.no_grad():
        if model == "smollm2":
            ids = tokenizer(inputs.text(), return_tensors="pt").input_ids
            network(ids[:, tokens:], use_cache=False)
        else:
            captured.forward(model, network, tokenizer)
    path = folder / f"{model}.safetensors"
    write(path, smoothing_of(open_captures(folder / model), STRENGTH).factors)
    return path


def rows_of(model: str, tokens: int, folder: Path) -> list[Row]:
    """A row for each kernel and what is done to outliers before it."""
    network, tokenizer = loaded = captured.load(model)
    plain = captured.forward(model, network, tokenizer, tokens=tokens)
    smoothing = factors(model, loaded, tokens, folder)
    rows = []
    for kernel in KERNELS:
        for path in (None, smoothing):
            for rotation in ROTATIONS:
                options = {"rotation": rotation, "smoothing": path}
                with linears.on_kernel(network, kernel, **options) as count:
                    values = captured.forward(model, network, tokenizer, tokens=tokens)
                difference = outputs.difference(values, plain)
                row = {
                    "model": model, "kernel": kernel, "rotation": rotation,
                    "smoothing": path is not None, "linears": count,
                    "rel_l1": difference.rel_l1, "cosine": difference.cosine,
                }  # fmt: skip
                if model == "smollm2":
                    row["perplexity"] = linears.perplexity(tokenizer, values, tokens)
                    row["perplexity_unpatched"] = linears.perplexity(tokenizer, plain, tokens)
                rows.append(row)
                say(", ".join(f"{name} {value}" for name, value in rounded(row).items()))
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--tokens", type=int, default=inputs.TOKENS)
    ask = parser.parse_args()
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for m in ask.only.split(",") for row in rows_of(m, ask.tokens, Path(folder))]
    report = {"identity": identity("cpu", torch.float32, ask.tokens), "rows": rows}
    ask.output.write_text(json.dumps(rounded(report), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
