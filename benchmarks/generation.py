"""What SmolLM2 writes on each kernel beside torch's attention: where texts part, and how closely.

A prompt of over 1,024 tokens, then greedy tokens; with `min_seq=1024` the prompt alone runs on the
kernel, with 1 each further token too. Where a text parts from SDPA's first, "gap" is by how much
SDPA's best logit there leads the next: a small one says that either token would have done.

    python benchmarks/generation.py --output generation.json [--models FOLDER] [--tokens 100]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accuracy import identity, kernels, write
from gpu_options import gpu_parser

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sage_plugin.plugin.patch import patched  # noqa: E402
from tests.real import captured, inputs, weights  # noqa: E402

KERNELS = ("fav2", "sage", "fav3_sage", "fav3_fp8")
SHORTEST = (1024, 1)

Row = dict[str, Any]


def written(network: Any, prompt: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
    """Greedy tokens `(count,)` and the logits `(count, V)` that each was chosen by, fp32."""
    with torch.no_grad():
        made = network.generate(
            prompt,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return made.sequences[0, prompt.shape[1] :], torch.cat(made.logits).float()


def parting(
    tokens: torch.Tensor, expected: torch.Tensor, logits: torch.Tensor
) -> tuple[int | None, float | None]:
    """Where two texts part first, and the gap of the expected text's top two logits there.

    Args:
        tokens: `(N,)`, a text.
        expected: `(N,)`, the other.
        logits: `(N, V)`, that `expected` was chosen by.

    Example:
        >>> logits = torch.tensor([[0.0, 4.0, 1.0], [2.0, 0.0, 1.5]])
        >>> parting(torch.tensor([1, 2]), torch.tensor([1, 0]), logits)
        (1, 0.5)
        >>> parting(torch.tensor([1, 0]), torch.tensor([1, 0]), logits)
        (None, None)
    """
    apart = (tokens != expected).nonzero()
    if len(apart) == 0:
        return None, None
    first = int(apart[0])
    best, next_best = logits[first].topk(2).values.tolist()
    return first, best - next_best


def rows_of(network: Any, prompt: torch.Tensor, args: argparse.Namespace) -> Iterator[Row]:  # noqa: ANN401
    """One row a kernel and shortest call."""
    expected, logits = written(network, prompt, args.tokens)
    for kernel in args.kernels:
        for min_seq in SHORTEST:
            with patched(network, kernel=kernel, min_seq=min_seq) as handle:
                tokens, own = written(network, prompt, args.tokens)
            report = handle.report()
            first, gap = parting(tokens, expected, logits)
            row: Row = {
                "kernel": kernel,
                "min_seq": min_seq,
                "kernel_calls": report.kernel_calls(),
                "layers": len(report.rows),
                "ran": sorted({label for row in report.rows for label in row.calls}),
                "parts_at": first,
                "gap": gap,
                "same_tokens": int((tokens == expected).sum()),
                "first_logits_max_error": float((own[0] - logits[0]).abs().max()),
                "first_logits_spread": float(logits[0].std()),
            }
            print(line_of(row, args.tokens), flush=True)
            yield row


def line_of(row: Row, count: int) -> str:
    """A row as text."""
    apart = (
        "the same text"
        if row["parts_at"] is None
        else f"parts at token {row['parts_at']} (gap {row['gap']:.4f}), "
        f"{row['same_tokens']} of {count} the same"
    )
    return f"{row['kernel']:10} min_seq {row['min_seq']:<5} {row['kernel_calls']:5} calls: {apart}"


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = gpu_parser(__doc__)
    add = parser.add_argument
    add("--models", type=Path, help="folder with the weights")
    add("--kernels", type=kernels, default=list(KERNELS))
    add("--tokens", type=int, default=100, help="tokens to write")
    add("--prompt", type=int, default=1100, help="tokens to read")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Generate and write."""
    args = parsed(argv)
    if args.models is not None:
        os.environ[weights.FOLDER_VARIABLE] = str(args.models)
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.float16) if cuda else ("cpu", torch.float32)
    network, tokenizer = captured.load("smollm2", device=device, dtype=dtype)
    prompt = inputs.token_ids(tokenizer, args.prompt).to(device)
    facts = {"dtype": str(dtype).removeprefix("torch."), "prompt": args.prompt}
    body = identity(device, args.commit) | facts | {"tokens": args.tokens}
    rows: list[Row] = []
    for row in rows_of(network, prompt, args):
        rows.append(row)
        write(args.output, body | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
