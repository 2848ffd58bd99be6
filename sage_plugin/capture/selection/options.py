"""What a recording is asked for, checked."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sage_plugin.capture.selection.heads import PartRule, checked_batch, checked_heads
from sage_plugin.capture.selection.spread import SpreadPolicy
from sage_plugin.capture.selection.steps import StepSelection
from sage_plugin.errors import UsageError
from sage_plugin.paged_records import PAGED_ATTENTION
from sage_plugin.schema import ATTENTION, GROUPED_LINEAR, LINEAR

DEFAULT_MAX_BYTES = 4 * 2**30
MIN_SEQ = 2
"""A single query is a decode step of a language model: quantising its whole cache never pays."""

ROWS = 1024
"""Rows of a linear's input: errors are judged on some hundred of them, each like the next."""

FAMILIES = (ATTENTION, LINEAR, GROUPED_LINEAR, PAGED_ATTENTION)
_PARTS = (
    ("heads", None, (ATTENTION,)),
    ("batch", None, (ATTENTION,)),
    ("rows", ROWS, (LINEAR, GROUPED_LINEAR, PAGED_ATTENTION)),
)
"""Options that choose a part of calls, what they are left out, and the op families that have it."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE)
MAX_SIZE_DIGITS = 20
_INDEX_BYTES = 16 * 2**10  # of each capture's share: file header, manifest line, counts


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """Which calls are saved, and how much of each.

    The fields are the arguments of `record`, which says what each means.

    Raises:
        UsageError: a value is out of range.
    """

    max_captures: int = 10
    layers: str | Iterable[str] = "*"
    steps: str | int | Iterable[int] | None = None
    every: int = 1
    per_shape: int | None = None
    heads: int | str | Iterable[int] | None = None
    batch: str | Iterable[int] | None = None
    max_bytes: int = DEFAULT_MAX_BYTES
    total_steps: int | None = None
    min_seq: int = MIN_SEQ
    overwrite: bool = False
    ops: str | Iterable[str] = (ATTENTION,)
    rows: int = ROWS

    def __post_init__(self) -> None:
        for name in ("layers", "steps", "heads", "batch"):
            value = getattr(self, name)
            if not isinstance(value, str | int | None):
                object.__setattr__(self, name, tuple(value))
        object.__setattr__(self, "ops", _checked_ops(self.ops))
        if self.rows < 1:
            raise UsageError(f"rows: got {self.rows}, expected at least 1")
        for name, usual, ops in _PARTS:
            if not {*ops} & {*self.ops} and getattr(self, name) != usual:
                raise UsageError(f"{name}: a part of calls of {ops[0]}, which is not recorded (op)")
        self.policy(), self.rule(), self.globs()  # each checks its part

    def policy(self) -> SpreadPolicy:
        """The chooser of calls."""
        return SpreadPolicy(
            self.max_captures,
            steps=StepSelection.parse(self.steps, self.every),
            total_steps=self.total_steps,
            per_shape=self.per_shape,
        )

    @property
    def share(self) -> int:
        """Bytes of one capture.

        Raises:
            UsageError: there are none.
        """
        captures = max(1, self.max_captures) * len(tuple(self.ops))
        share = self.max_bytes // captures - _INDEX_BYTES
        if share < 1:
            raise UsageError(
                f"max_bytes: got {self.max_bytes}, expected at least "
                f"{(_INDEX_BYTES + 1) * captures} for {captures} captures"
            )
        return share

    def rule(self) -> PartRule:
        """The chooser of the part of a call of attention."""
        batch = None if self.batch is None else checked_batch(self.batch)
        return PartRule(self.share, checked_heads(self.heads), batch)

    def globs(self) -> tuple[str, ...]:
        """The layer globs, one by one."""
        texts = (self.layers,) if isinstance(self.layers, str) else tuple(self.layers)
        globs = tuple(glob.strip() for text in texts for glob in text.split(",") if glob.strip())
        if not globs:
            raise UsageError("layers: got no glob; '*' selects every layer")
        return globs


def _checked_ops(ops: str | Iterable[str]) -> tuple[str, ...]:
    """Op families by name, each once.

    Raises:
        UsageError: an unknown one, or none.
    """
    names = ops.split(",") if isinstance(ops, str) else ops
    found = tuple(dict.fromkeys(name.strip() for name in names))
    if unknown := [name for name in found if name not in FAMILIES] or (not found and ["nothing"]):
        raise UsageError(f"op: got {unknown[0]!r}, expected {', '.join(FAMILIES)}, or several")
    return found


def parse_bytes(text: str) -> int:
    """Read a size such as `"4GiB"`, `"500MB"` or `"1000000"`.

    Raises:
        UsageError: anything else.

    Example:
        >>> parse_bytes("1.5KiB")
        1536
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or len(match[1]) > MAX_SIZE_DIGITS:
        raise UsageError(f'bytes: got {text!r}, expected a size such as "4GiB" or "500MB"')
    number, prefix, binary = match.groups()
    power = " KMGT".index((prefix or " ").upper())
    return int(float(number) * (1024 if binary else 1000) ** power)
