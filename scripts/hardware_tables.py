"""The tables of docs/hardware.md: from the support table, the default configs and the matrix.

python scripts/hardware_tables.py          say which tables of the page are out of date
python scripts/hardware_tables.py --write  write them
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sage_plugin import device  # noqa: E402
from sage_plugin.kernels.attention.launch_space import default_config  # noqa: E402
from sage_plugin.kernels.support import (  # noqa: E402
    ARCHITECTURES,
    HOPPER_ARCH,
    HOPPER_HEAD_DIMS,
    TRITON_KERNELS,
)

PAGE = ROOT / "docs" / "hardware.md"
MATRIX = ROOT / "benchmarks" / "results" / "compile_matrix.json"
MARK = "<!-- {} -->"
DIMS = (64, 128, 256)
COMPILED = [row for row in ARCHITECTURES if row.kernels]
FP8 = {"float8_e4m3fn": "e4m3fn", "float8_e4m3fnuz": "e4m3fnuz", None: "none"}


def support_table() -> list[str]:
    """What runs where, and why the rest does not."""
    lines = [
        "| architecture | for example | kernels | FP8 type | lowest Triton | |",
        "|---|---|---|---|---|---|",
    ]
    for row in ARCHITECTURES:
        names = ", ".join(row.names)
        kernels = ", ".join(f"`{kernel}`" for kernel in row.kernels) or "none: host attention"
        triton = row.triton if row.kernels else ""
        remarks = "; ".join(part for part in (row.reason, row.note) if part)
        fp8 = FP8[device.fp8_dtype(row.names[0])]
        lines.append(f"| {names} | {row.chips} | {kernels} | {fp8} | {triton} | {remarks} |")
    return lines


def config_table() -> list[str]:
    """Default launch configs of bf16 calls without a dense mask."""
    lines = ["| kernel | architectures | D <= 64 | D <= 128 | D <= 256 |", "|---|---|---|---|---|"]
    for kernel in TRITON_KERNELS:
        found: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for row in COMPILED:
            if kernel in row.kernels:
                at = tuple(_tile(kernel, row.names[0], dim) for dim in DIMS)
                found[at].append(row.names[0])
        for tiles, names in found.items():
            lines.append(f"| `{kernel}` | {', '.join(names)} | {' | '.join(tiles)} |")
        if "hopper" in TRITON_KERNELS[kernel]:
            tiles = tuple(_tile(kernel, HOPPER_ARCH, dim, "hopper") for dim in DIMS)
            lines.append(f"| `{kernel}:hopper` | {HOPPER_ARCH} | {' | '.join(tiles)} |")
    return lines


def _tile(kernel: str, arch: str, dim: int, variant: str = "portable") -> str:
    if variant == "hopper" and dim > HOPPER_HEAD_DIMS[1]:
        return "portable"
    config = default_config(kernel, arch, dim, variant=variant)
    assert config is not None
    text = f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages}"
    text += f" r{config.maxnreg}" if config.maxnreg else ""
    text += f" f{config.pv_flush}" if config.pv_flush != 1 else ""
    text += f" e{config.exp_linear}" if config.exp_linear else ""
    text += " o" if config.overlap else ""
    text += " p" if config.persistent else ""
    return text + (" TMA" if config.loads == "descriptor" else "")


def matrix_table() -> list[str]:
    """What the attention kernels need, at most, as compiled by each Triton."""
    matrix = json.loads(MATRIX.read_text())
    rows = [dict(zip(matrix["columns"], row, strict=True)) for row in matrix["rows"]]
    versions = list(dict.fromkeys(row["triton"] for row in rows))
    lines = [
        "| architecture | shared memory, KiB | "
        + " | ".join(f"spilt, Triton {version}" for version in versions)
        + " |",
        "|---|---|" + "---|" * len(versions),
    ]
    for row in COMPILED:
        own = [
            one
            for one in rows
            if one["arch"] == row.names[0] and one["variant"] in ("portable", "hopper")
        ]
        attention = [one for one in own if one["name"].endswith("attention_kernel")]
        most = max((one["smem_bytes"] for one in own), default=0)
        cells = [_spills([one for one in attention if one["triton"] == v]) for v in versions]
        lines.append(
            f"| {row.names[0]} | {-(-most // 1024)} of {row.smem_kib} | {' | '.join(cells)} |"
        )
    return lines


def _spills(rows: list[dict[str, Any]]) -> str:
    """Most bytes that a thread spills in plain 16-bit calls up to 128 channels, and in any."""
    if not rows:
        return "not compiled"
    common = [
        one["spill_bytes"]
        for one in rows
        if one["dim"] in (64, 128) and one["dtype"] != "float32" and not one["form"]
    ]
    return f"{max(common)} / {max(one['spill_bytes'] for one in rows)}"


TABLES = {"support": support_table, "configs": config_table, "matrix": matrix_table}


def rendered(page: str) -> str:
    """The page with its tables as they should be."""
    for name, table in TABLES.items():
        start, end = MARK.format(f"table: {name}"), MARK.format(f"end: {name}")
        text = "\n".join([start, *table(), end])
        pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
        assert pattern.search(page), f"{PAGE.name} has no {start}"
        page = pattern.sub(lambda _, text=text: text, page)
    return page


def main() -> int:
    """Write the page, or say that it is out of date."""
    now = PAGE.read_text(encoding="utf-8")
    wanted = rendered(now)
    if "--write" in sys.argv:
        PAGE.write_text(wanted, encoding="utf-8")
    elif wanted != now:
        print(f"{PAGE} is out of date: run this with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
