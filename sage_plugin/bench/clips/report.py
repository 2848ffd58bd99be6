"""A proof as one JSON object."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from sage_plugin.bench.clips.record import ClipRow, Proof

SCHEMA_VERSION = 1


def body(proof: Proof) -> dict[str, Any]:
    """A proof in plain JSON types, with what follows from it; equal clips have PSNR `"inf"`."""
    data = {
        "above_line_db": proof.above_line_db,
        **proof.to_json(),
        "rows": [_row(row) for row in proof.rows],
    }
    finite: dict[str, Any] = _finite(data)
    return finite


def json_text(proof: Proof, facts: Mapping[str, Any]) -> str:
    """The file of a proof.

    Args:
        proof: the proof.
        facts: what it was made with, in JSON types.

    Example:
        >>> json.loads(json_text(Proof((), None, "", ()), {"seed": 0}))["seed"]
        0
    """
    whole = {"schema_version": SCHEMA_VERSION, **facts, **body(proof)}
    return json.dumps(whole, indent=1, allow_nan=False) + "\n"


def _row(row: ClipRow) -> dict[str, Any]:
    found = row.quality
    return {
        **row.to_json(),
        "mean_psnr_db": found.mean_psnr_db,
        "min_psnr_db": found.min_psnr_db,
        "mean_ssim": found.mean_ssim,
        "min_ssim": found.min_ssim,
    }


def _finite(value: Any) -> Any:  # noqa: ANN401
    """The same with words for the numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value
