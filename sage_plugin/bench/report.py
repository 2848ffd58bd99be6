"""The files of a comparison: CSV and JSON, each row with its whole identity."""

from __future__ import annotations

import csv
import io
import json
import math
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from sage_plugin import files
from sage_plugin.bench.rows import KernelRow, Table
from sage_plugin.errors import OutputError
from sage_plugin.measure.clocks import ClockSnapshot
from sage_plugin.schema import SCHEMA_VERSION, DeviceFacts, Timing, Toolchain

REFERENCE_ERRORS = ("rel_l1", "cosine", "rmse", "max_abs", "row_cosine_p10", "centred_rel_l1")


def flat(row: KernelRow, device: DeviceFacts, toolchain: Toolchain) -> dict[str, Any]:
    """Return one CSV line by column name; units stand in the names."""
    cells: dict[str, Any] = {
        "input": row.input,
        "source": row.source,
        "input_sha256": row.input_sha256,
        **{f"shape_{name}": value for name, value in row.shape.to_json().items()},
        "kernel": row.kernel,
        "variant": row.variant,
        "config": row.config.text() if row.config else "",
        "config_source": row.config_source,
        "method": row.time.method,
        "samples": row.time.n,
        **_times("time", row.time),
        **_times("kernel_time", row.kernel_time),
        "throughput_tflops": row.tflops,
        "bandwidth_gb_per_s": row.gb_per_s,
        "arithmetic_intensity_flop_per_byte": row.flop_per_byte,
        "flops": row.flops,
        "moved_bytes": row.moved_bytes,
        **{f"oracle_{name}": value for name, value in row.errors.to_json().items()},
        "reference": row.reference,
        **{f"reference_{n}": getattr(row.reference_errors, n, None) for n in REFERENCE_ERRORS},
        "speedup": row.speedup,
        "speedup_low": row.speedup_low,
        "speedup_high": row.speedup_high,
        "gate": "fail" if row.gate else "pass",
        "gate_reasons": "; ".join(row.gate),
        "stamp": row.stamp,
        "note": row.note,
        "device": device.name,
        "device_slug": device.slug,
        **{f"version_{name}": value for name, value in toolchain.to_json().items()},
    }
    return {name: "" if value is None else value for name, value in cells.items()}


def _times(name: str, timing: Timing | None) -> dict[str, float | None]:
    return {
        f"{name}_ms": timing.median_ms if timing else None,
        f"{name}_low_ms": timing.low_ms if timing else None,
        f"{name}_high_ms": timing.high_ms if timing else None,
    }


def csv_text(tables: Iterable[Table], device: DeviceFacts, toolchain: Toolchain) -> str:
    """Write all rows as CSV with a header line."""
    lines = [flat(row, device, toolchain) for table in tables for row in table.rows]
    out = io.StringIO()
    if lines:
        writer = csv.DictWriter(out, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return out.getvalue()


def json_text(tables: Iterable[Table], device: DeviceFacts, toolchain: Toolchain) -> str:
    """Write all tables as one JSON object, rows nested as their records are."""
    body = {
        "schema_version": SCHEMA_VERSION,
        "device": device.to_json(),
        "toolchain": toolchain.to_json(),
        "tables": [
            {
                "input": table.input,
                "shape": table.shape.to_json(),
                "stamp": table.stamp,
                "aa_ratio": table.aa_ratio,
                "clocks_before": _clocks(table.before),
                "clocks_after": _clocks(table.after),
                "failed": list(table.failed),
                "rows": [
                    {
                        **row.to_json(),
                        "tflops": row.tflops,
                        "gb_per_s": row.gb_per_s,
                        "flop_per_byte": row.flop_per_byte,
                    }
                    for row in table.rows
                ],
            }
            for table in tables
        ],
    }
    return json.dumps(finite(body), indent=1, allow_nan=False) + "\n"


def finite(value: Any, spell: Callable[[float], object] = lambda _: None) -> Any:  # noqa: ANN401
    """Replace the numbers that JSON does not have by what `spell` makes of them, here `null`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else spell(value)
    if isinstance(value, dict):
        return {key: finite(part, spell) for key, part in value.items()}
    return [finite(part, spell) for part in value] if isinstance(value, list | tuple) else value


def _clocks(state: ClockSnapshot | None) -> dict[str, Any] | None:
    if state is None:
        return None
    return {name: getattr(state, name) for name in ClockSnapshot.__slots__}


def check_writable(path: Path) -> None:
    """Refuse an output file before hours of measuring, not after them."""
    folder = path.absolute().parent
    if path.is_dir():
        raise OutputError(f"{path} is a folder; name a file")
    if not folder.is_dir():
        raise OutputError(f"{path}: folder {folder} does not exist; create it first")
    with files.writing(path), tempfile.TemporaryFile(dir=folder):
        pass
