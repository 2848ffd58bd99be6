"""Prints `results/gates.json` as the Markdown tables of `docs/accuracy.md`.

python benchmarks/gate_tables.py [benchmarks/results/gates.json]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DEFAULT = Path(__file__).parent / "results" / "gates.json"
KERNELS = ("fav2", "sage", "fav3_sage", "fav3_fp8")
REAL = ("smollm2", "minilm", "whisper", "demo")
Rows = Sequence[dict[str, Any]]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def errors(rows: Rows) -> str:
    """Median relative L1, and the worst head's in the worst layer, a model a row."""
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = []
        for kernel in KERNELS:
            mine = [r["errors"] for r in rows if (r["model"], r["kernel"]) == (model, kernel)]
            median = sorted(m["rel_l1"] for m in mine)[len(mine) // 2]
            worst = max(m["worst_head_rel_l1"] for m in mine)
            centered = max(m["centred_rel_l1"] for m in mine)
            cells.append(f"{median:.4f} / {worst:.4f} / {centered:.4f}")
        found.append([model, *cells])
    return table(["inputs", *KERNELS], found)


def gates(report: dict[str, Any]) -> str:
    """The limits, each beside the worst value that it comes from."""
    found = []
    for kernel, gate in report["gates"].items():
        worst = report["worst"][kernel]
        pairs = [
            (gate["max_worst_head_rel_l1"], worst["worst_head_rel_l1"], ".4f"),
            (gate["max_centred_rel_l1"], worst["centred_rel_l1"], ".4f"),
            (gate["min_cosine"], worst["worst_head_cosine"], ".7f"),
            (gate["min_row_cosine_p10"], worst["worst_head_row_cosine_p10"], ".7f"),
        ]
        cells = ["none" if a is None else f"{a:.7g} ({b:{form}})" for a, b, form in pairs]
        found.append([f"`{kernel}`", *cells])
    head = ("kernel", "L1 of the worst head", "centred L1", "cosine", "row cosine p10")
    return table(head, found)


def faults(rows: Rows) -> str:
    """How many inputs each mistake is refused on, beside the worst head's relative L1."""
    found = []
    for name in dict.fromkeys(row["fault"] for row in rows):
        mine = {row["kernel"]: row for row in rows if row["fault"] == name}
        cells = [
            f"{mine[k]['worst_head_rel_l1']:.3f}, {len(mine[k]['refused_by'])}"
            if k in mine
            else "–"
            for k in KERNELS[1:]
        ]
        lse = max(row["lse_error"] for row in mine.values())
        found.append([name, *cells, f"{lse:.1f}"])
    return table(("mistake", *KERNELS[1:], "LSE"), found)


def options(rows: Rows, kernel: str) -> str:
    """Median and worst layer of each model under each option."""
    mine = [row for row in rows if row["kernel"] == kernel]
    models = dict.fromkeys(row["model"] for row in mine)
    found = []
    for option in dict.fromkeys(row["option"] for row in mine):
        cells = []
        for model in models:
            row = next(r for r in mine if (r["option"], r["model"]) == (option, model))
            if model in REAL:
                cells.append(f"{row['median_rel_l1']:.4f} / {row['worst_head_rel_l1']:.4f}")
            else:
                cells.append(f"{row['centred_rel_l1']:.4f}")
        found.append([option, *cells])
    return table(("option", *models), found)


def main(arguments: list[str]) -> None:
    """Print all tables."""
    report = json.loads(Path(arguments[0] if arguments else DEFAULT).read_text(encoding="utf-8"))
    print(errors(report["captures"]), gates(report), faults(report["faults"]), sep="\n\n")
    for kernel in KERNELS[1:]:
        print(f"\n{kernel}\n\n{options(report['options'], kernel)}")


if __name__ == "__main__":
    main(sys.argv[1:])
