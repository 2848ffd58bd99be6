"""A mixture that learns English on the spot, and its perplexity with experts in 8 bits.

Two layers of eight experts read the package's own documents letter by letter. Trained experts are
used unevenly, unlike those of random weights, so that groups are as skewed as in real models.

    python benchmarks/small_mixture.py --output small_mixture.json [--steps 400]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sage_plugin
from sage_plugin.plugin.experts.eligible import find_experts

ROOT = Path(__file__).resolve().parent.parent
LETTERS, LENGTH, BATCH = 128, 128, 16
KERNELS = ("int8_row", "fp8_row")


def text() -> torch.Tensor:
    """The documents as letters."""
    pages = [(ROOT / name).read_text() for name in ("README.md", "DESIGN.md", "CONTRIBUTING.md")]
    pages += [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
    return torch.tensor([ord(letter) % LETTERS for letter in "\n".join(pages)])


def model() -> nn.Module:
    """An untrained mixture."""
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=LETTERS, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=8,
        max_position_embeddings=LENGTH, output_router_logits=True, router_aux_loss_coef=0.001,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def batches(letters: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """Random pieces of the text."""
    for _ in range(count):
        starts = torch.randint(len(letters) - LENGTH, (BATCH,))
        yield torch.stack([letters[start : start + LENGTH] for start in starts])


def train(mixture: nn.Module, letters: torch.Tensor, steps: int) -> None:
    """Let a mixture learn the text."""
    mixture.train()
    optimizer = torch.optim.AdamW(mixture.parameters(), lr=2e-3)
    for pieces in batches(letters, steps):
        optimizer.zero_grad()
        mixture(pieces, labels=pieces).loss.backward()
        optimizer.step()
    mixture.eval()


@torch.no_grad()
def perplexity(mixture: nn.Module, letters: torch.Tensor, count: int = 8) -> float:
    """Of pieces that are the same each time."""
    torch.manual_seed(1)
    losses = []
    for pieces in batches(letters, count):
        logits = mixture(pieces, output_router_logits=False).logits
        wanted = pieces[:, 1:].flatten()
        losses.append(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), wanted))
    return math.exp(float(torch.stack(losses).mean()))


@torch.no_grad()
def shares(mixture: nn.Module, letters: torch.Tensor) -> dict[str, list[float]]:
    """The share of rows that each expert of each layer gets, largest first."""
    found: dict[str, list[float]] = {}

    def note(path: str) -> Any:  # noqa: ANN401
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            counts = torch.bincount(args[1].flatten(), minlength=8).float()
            found[path] = sorted((counts / counts.sum()).tolist(), reverse=True)

        return hook

    hooks = [
        module.register_forward_pre_hook(note(path))
        for path, module in find_experts(mixture).items()
    ]
    mixture(next(batches(letters, 1)), output_router_logits=False)
    for hook in hooks:
        hook.remove()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Train, patch, compare, and write one JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--steps", type=int, default=400, help="steps of training")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    letters, mixture = text(), model()
    cut = len(letters) * 9 // 10
    found: dict[str, Any] = {"steps": args.steps, "letters": len(letters)}
    train(mixture, letters[:cut], args.steps)
    found["perplexity"] = {"fp32": perplexity(mixture, letters[cut:])}
    found["shares"] = shares(mixture, letters[cut:])
    found["calls"] = {}
    for kernel in KERNELS:
        options = {"kernel": "sdpa", "linears": kernel, "include": "*experts"}
        with sage_plugin.patched(mixture, **options) as handle:
            found["perplexity"][kernel] = perplexity(mixture, letters[cut:])
            rows = handle.report().linears
        found["calls"][kernel] = {row.layer: sum(row.calls.values()) for row in rows}
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    print(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
