"""Linears of models with real weights in 8 bits: errors by gate, sensitive ones, perplexity.

Four tables go into one JSON file. `gates`: the worst errors of each kernel on a recorded call of
every linear and on drawn inputs, and the limits that `tests/real/rule.py` makes of them.
`captures`: the error of each linear by itself. `sensitivity`: what the output of SmolLM2, MiniLM
and Whisper's encoder loses when one linear alone is quantized (relative L1, and SmolLM2's
perplexity); of the demo's model `sage policy sensitivity --kernel fp8_row` draws clips. `whole`:
the outputs with all linears quantized, with SmolLM2's perplexity. Kernels are emulated on a CPU,
exactly. Needs the weights of `tests/real/requirements.txt`, and about half an hour of one core.

    python benchmarks/linear_models.py --output benchmarks/results/linear_models.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from real_models import identity  # noqa: E402
from set_gates import rounded, say  # noqa: E402

from sage_plugin import device as devices  # noqa: E402
from sage_plugin.accuracy.gate import failures, worst  # noqa: E402
from sage_plugin.families import describe  # noqa: E402
from sage_plugin.families.linear import replay  # noqa: E402
from sage_plugin.families.linear.entry import decide  # noqa: E402
from sage_plugin.families.linear.gates import gate_for  # noqa: E402
from sage_plugin.schema import ErrorMetrics, LinearShape  # noqa: E402
from tests.real import captured, inputs, linears, outputs, rule  # noqa: E402

Row = dict[str, Any]
DRAWN = ("normal", "biased")
SHAPES = tuple(
    LinearShape(256, k, n, "bfloat16") for k, n in ((128, 96), (3072, 3072), (8192, 512))
)
CAPTURED = ("rel_l1", "worst_head_rel_l1", "centred_rel_l1")
LOST = ("rel_l1", "perplexity")
ALONE = ("fp8_row", "int8_row")
ALONE_TOKENS = 96
"""Tokens that SmolLM2 reads for each of its linears, which are as many forwards."""
ALONE_BLOCKS = re.compile(r"model\.layers\.(?!\d*[0369]\.)")
"""Of its 30 blocks, those that are left out."""


def capture_rows(model: str) -> list[Row]:
    """Errors of every kernel on a call of every linear of a model."""
    rows = []
    facts = devices.facts("cpu")
    for one in linears.recorded(model):
        for kernel in linears.KERNELS:
            errors = one.call.errors(decide(one.call.shape, facts, kernel=kernel), None)
            rows.append({
                "model": model, "layer": one.layer, "kernel": kernel, "errors": errors.to_json(),
                "refused": failures(gate_for(kernel), errors),
            })  # fmt: skip
    for kernel in linears.KERNELS:
        of = [row["errors"]["worst_head_rel_l1"] for row in rows if row["kernel"] == kernel]
        say(f"{model:8} {kernel:10} worst block of rows {max(of):.4f}")
    return rows


def drawn_rows() -> list[Row]:
    """The same of drawn inputs, on which no right kernel may break its gate."""
    rows = []
    facts = devices.facts("cpu")
    for distribution, shape in itertools.product(DRAWN, SHAPES):
        call = replay.drawn(shape, "cpu", distribution=distribution)
        for kernel in linears.KERNELS:
            errors = call.errors(decide(shape, facts, kernel=kernel), None)
            rows.append({
                "model": f"random {distribution}", "layer": describe(shape), "kernel": kernel,
                "errors": errors.to_json(), "refused": failures(gate_for(kernel), errors),
            })  # fmt: skip
    return rows


def gates_of(rows: Sequence[Row]) -> Row:
    """What the rule of attention's gates makes of the errors of each kernel."""
    found = {}
    for kernel in linears.KERNELS:
        errors = [ErrorMetrics.from_json(r["errors"]) for r in rows if r["kernel"] == kernel]
        base = worst(errors)
        found[kernel] = {
            "worst": base.to_json(),
            "gate": rule.gate_of(base).to_json(),
            "refused": sum(bool(r["refused"]) for r in rows if r["kernel"] == kernel),
            "captures": len(errors),
        }
    return found


def output_rows(model: str, tokens: int) -> tuple[list[Row], list[Row]]:
    """The output with one linear quantized at a time, and with all."""
    network, tokenizer = captured.load(model)

    def run(tokens: int) -> tuple[torch.Tensor, float | None]:
        values = captured.forward(model, network, tokenizer, tokens=tokens)
        told = model == "smollm2"
        return values, linears.perplexity(tokenizer, values, tokens) if told else None

    unpatched = {count: run(count) for count in (tokens, ALONE_TOKENS)}

    def row(kernel: str, tokens: int, patch: contextlib.AbstractContextManager[int]) -> Row:
        plain, base = unpatched[tokens]
        with patch as count:
            values, perplexity = run(tokens)
        difference = outputs.difference(values, plain)
        return {
            "model": model, "kernel": kernel, "linears": count,
            "rel_l1": difference.rel_l1, "cosine": difference.cosine, "top1": difference.top1,
            "perplexity": perplexity, "perplexity_unpatched": base, "tokens": tokens,
        }  # fmt: skip

    whole = [row(kernel, tokens, linears.on_kernel(network, kernel)) for kernel in linears.KERNELS]
    for one in whole:
        say(line(one))
    alone = []
    paths = [path for path in linears.names(network) if not ALONE_BLOCKS.match(path)]
    for number, name in enumerate(paths, start=1):
        for kernel in ALONE:
            one = linears.one_on_kernel(network, kernel, name)
            alone.append(row(kernel, ALONE_TOKENS, one) | {"layer": name})
        if number % 20 == 0:
            say(f"{model:8} {number} linears one by one")
    return alone, whole


def by_layer(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    """One row for each linear, and in it the numbers of each kernel."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        at = row["model"], row["layer"]
        one = found.setdefault(at, {"model": at[0], "layer": at[1]})
        for name in names:
            if row[name] is not None:
                one.setdefault(name, {})[row["kernel"]] = row[name]
    return list(found.values())


def line(row: Row) -> str:
    """A row of `whole` as text."""
    told = ""
    if row["perplexity"] is not None:
        told = f"  perplexity {row['perplexity']:.4f} (unpatched {row['perplexity_unpatched']:.4f})"
    return (
        f"{row['model']:8} {row['kernel']:10} {row['linears']:3} linears  L1 {row['rel_l1']:.5f} "
        f"cosine {row['cosine']:.6f} top-1 {row['top1']:.4f}{told}"
    )


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", default=",".join(captured.SETS))
    parser.add_argument("--tokens", type=int, default=inputs.TOKENS)
    parser.add_argument("--clips", type=Path, nargs="*", default=[], help="of policy sensitivity")
    ask = parser.parse_args()
    torch.set_grad_enabled(False)
    rows, alone, whole = drawn_rows(), list[Row](), list[Row]()
    for model in ask.only.split(","):
        rows += capture_rows(model)
        if model != "demo":
            one, every = output_rows(model, ask.tokens)
            alone, whole = alone + one, whole + every
        report = {
            "identity": identity("cpu", torch.float32, ask.tokens),
            "gates": gates_of(rows),
            "captures": by_layer([row | row["errors"] for row in rows], CAPTURED),
            "sensitivity": by_layer(alone, LOST),
            "whole": whole,
            "clips": [json.loads(path.read_text(encoding="utf-8")) for path in ask.clips],
        }
        ask.output.write_text(json.dumps(rounded(report), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
