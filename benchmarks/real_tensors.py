"""Writes Q, K and V of some layers of the real models to a file for `accuracy.py --tensors`.

MiniLM is left out, since its calls have a mask. Needs the weights of `tests/real/requirements.txt`.

    python benchmarks/real_tensors.py --output real.safetensors
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.real import captured  # noqa: E402

LAYERS = {"smollm2": (0, 10, 18, 28), "whisper": (0, 1, 2, 3), "demo": (0, 1)}


def main() -> None:
    """Capture and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    ask = parser.parse_args()
    tensors: dict[str, torch.Tensor] = {}
    notes: dict[str, str] = {}
    for model, layers in LAYERS.items():
        for layer in layers:
            call, name = captured.captured(model)[layer].call, f"{model}-{layer}"
            for part in "qkv":
                tensors[f"{name}.{part}"] = getattr(call, part).contiguous()
            notes[f"{name}.causal"] = str(call.causal).lower()
            if call.scale is not None:
                notes[f"{name}.scale"] = repr(call.scale)
    save_file(tensors, ask.output, metadata=notes)
    print(f"{len(notes)} notes and {len(tensors)} tensors written to {ask.output}")


if __name__ == "__main__":
    main()
