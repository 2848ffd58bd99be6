"""The README's table of our kernels beside their peers, from a result of `peers.py`.

The file that it is made from stands in the README's mark, so that a newer one is a changed name.

    python benchmarks/peer_tables.py [--write]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
MARKS = re.compile(r"(<!-- table: (peers_[\w-]+\.json) -->\n).*?(<!-- end -->)", re.S)
OURS = ("fav3_sage", "fav3_fp8", "sage")
ALONE = " kernel alone"
PEERS = {
    f"fa3 fp8{ALONE}": "FA3 FP8, alone",
    "fa3 bf16": "FA3 bf16",
    "sdpa cudnn": "cuDNN bf16",
    "sageattention 1.0.6": "SageAttention 1.0.6",
}
"""Columns beside ours, where the file has them."""

Row = dict[str, Any]


def table(report: Row) -> str:
    """The table, a preset a line: TFLOPS of the kernel alone / with quantisation, and the error."""
    found = {(row["preset"], row["variant"]): row for row in report["rows"]}
    peers = [name for name in PEERS if any(row["variant"] == name for row in report["rows"])]
    heads = ["shape", *(f"`{kernel}`" for kernel in OURS), *(PEERS[name] for name in peers)]
    lines = [heads, ["---"] * len(heads)]
    for one in report["tables"]:
        preset, shape = one["preset"], one["shape"]
        size = "x".join(str(shape[name]) for name in ("batch", "heads_q", "seq_q", "head_dim"))
        noisy = "" if one["stamp"] == "clean" else f", {one['stamp']}"
        lines.append(
            [
                f"{preset}: {size}{noisy}",
                *(_ours(found, preset, kernel) for kernel in OURS),
                *(_theirs(found, preset, name) for name in peers),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ours(found: dict[tuple[str, str], Row], preset: str, kernel: str) -> str:
    whole, alone = found[preset, kernel], found[preset, kernel + ALONE]
    error = whole["centred_rel_l1"]
    return f"{alone['tflops']:.0f} / {whole['tflops']:.0f} ({error:.3f})"


def _theirs(found: dict[tuple[str, str], Row], preset: str, name: str) -> str:
    row = found[preset, name]
    alone = found.get((preset, name + ALONE))
    speed = (
        f"{row['tflops']:.0f}" if alone is None else f"{alone['tflops']:.0f} / {row['tflops']:.0f}"
    )
    error = row["centred_rel_l1"]
    return f"{speed} ({error:.2f})" if error < 10 else f"{speed} ({error:.0f})"


def rendered(page: str) -> str:
    """The page with its table as it should be."""
    found = MARKS.search(page)
    if found is None:
        raise ValueError("the page has no mark `<!-- table: peers_....json -->`")
    report = json.loads((RESULTS / found[2]).read_text(encoding="utf-8"))
    return MARKS.sub(lambda match: f"{match[1]}{table(report)}\n{match[3]}", page)


def main() -> int:
    """Write the page, or say that it is out of date."""
    now = README.read_text(encoding="utf-8")
    wanted = rendered(now)
    if "--write" in sys.argv:
        README.write_text(wanted, encoding="utf-8")
    elif wanted != now:
        print(f"{README} is out of date: run this with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
