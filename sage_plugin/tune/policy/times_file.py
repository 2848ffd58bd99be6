"""Times of another machine, from what `sage bench --json` wrote there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sage_plugin import files
from sage_plugin.errors import ConfigError
from sage_plugin.json_record import record_from_json
from sage_plugin.schema import AnyShape, CallShape, LinearShape
from sage_plugin.tune.policy.grid import sizes, work

MAX_BYTES = 64 * 2**20
FARTHEST = 4.0
"""A call is timed by another one of up to so many times its work, or a part as small."""

Times = Mapping[AnyShape, Mapping[str, float]]
"""Milliseconds of a call by its shape and what it runs on."""


def read(first: Path, *more: Path) -> tuple[str, Times]:
    """Name of the device, and its times, of one file or several.

    Raises:
        ConfigError: a file cannot be read, is no result of `sage bench`, is of another device, or
            its times are those of emulations.
    """
    device, times = _read(first)
    for path in more:
        other, further = _read(path)
        if other != device:
            raise ConfigError(f"{path} has times of {other}, and {first} of {device}")
        times |= further
    return device, times


def _read(path: Path) -> tuple[str, dict[AnyShape, dict[str, float]]]:
    data = files.read_json(path, MAX_BYTES, "result of `sage bench`")
    times: dict[AnyShape, dict[str, float]] = {}
    try:
        device = str(data["device"]["name"])
        for table in data["tables"]:
            for row in table["rows"]:
                if row["note"]:
                    continue
                ms = float(row["time"]["median_ms"])
                if not 0 < ms < math.inf:
                    raise ValueError(f"a time of {ms} ms")
                shape = record_from_json(row["shape"], (CallShape, LinearShape))
                if min(sizes(shape)) < 1:
                    raise ValueError(f"a call of {work(shape)} products")
                times.setdefault(shape, {})[str(row["kernel"])] = ms
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{path}: no result of `sage bench --json` ({type(error).__name__}: {error})"
        ) from error
    if not any(len(row) > 1 for row in times.values()):
        raise ConfigError(
            f"{path}: holds no times of kernels on a GPU; write it there with "
            "`sage bench captured_inputs --json times.json`"
        )
    return device, times


def scaled(times: Times, shape: AnyShape) -> dict[str, float]:
    """Scale the times of the nearest call that was timed, in proportion to the work.

    Calls are compared that differ in batch, heads and lengths alone, or in rows; a call that has no
    other within four times its size has no times.

    Example:
        >>> from sage_plugin.measure.inputs import self_attention
        >>> times = {self_attention(1, 2, 2000, 64): {"sdpa": 4.0}}
        >>> scaled(times, self_attention(1, 2, 1000, 64))
        {'sdpa': 1.0}
        >>> scaled(times, self_attention(1, 2, 100, 64))
        {}
    """
    if shape in times:
        return dict(times[shape])
    alike = [other for other in times if _form(other) == _form(shape)]
    if not alike:
        return {}
    nearest = min(alike, key=lambda other: abs(math.log(work(other) / work(shape))))
    ratio = work(shape) / work(nearest)
    if not 1 / FARTHEST <= ratio <= FARTHEST:
        return {}
    return {label: ms * ratio for label, ms in times[nearest].items()}


def _form(shape: AnyShape) -> AnyShape:
    """A shape without its sizes."""
    if isinstance(shape, LinearShape):
        return replace(shape, rows=1)
    assert isinstance(shape, CallShape), "policies are of calls that are captured"
    return replace(shape, batch=1, heads_q=1, heads_k=1, seq_q=1, seq_k=1, layout="bhsd")
