"""Options that spell out batches of paged attention, in the words of `tpu-tune rpa-v3`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.options import (
    DEFAULT_FOLDER,
    DTYPES,
    DrawnInputOptions,
    ShapeOptions,
    dtype_name,
    given_of,
    lengths,
    one_of,
)
from sage_plugin.errors import UsageError
from sage_plugin.paged_records import PAGED_ATTENTION, PAGED_KINDS, PagedShape

if TYPE_CHECKING:
    from sage_plugin.replay.inputs import ReplayInputs

PANEL = "Paged attention (--op paged_attention)"
CACHES = {"fp8": "float8_e4m3fn", "int8": "int8"}
SHARED = ("--head-dim", "--dtype", "--inputs-distribution")
"""Options of attention that paged attention has too."""

CHUNK = 2048
"""Rows of the one prompt in a mixed batch."""


@dataclass(frozen=True, slots=True)
class PagedOptions:
    """Batches of sequences over pages; lists are multiplied, `None` is what was not given."""

    page_size: Annotated[
        list[str] | None, typer.Option(help="Tokens of a page (default 64).", rich_help_panel=PANEL)
    ] = None
    num_q_heads: Annotated[
        list[str] | None, typer.Option(help="Query heads (default 32).", rich_help_panel=PANEL)
    ] = None
    num_kv_heads: Annotated[
        list[str] | None, typer.Option(help="Key heads (default 8).", rich_help_panel=PANEL)
    ] = None
    max_model_len: Annotated[
        list[str] | None,
        typer.Option(help="Keys of each sequence, as 8192,32768.", rich_help_panel=PANEL),
    ] = None
    num_sequences: Annotated[
        list[str] | None,
        typer.Option(help="Sequences of a batch (default 35).", rich_help_panel=PANEL),
    ] = None
    kind: Annotated[
        list[str] | None,
        typer.Option(help="decode, prefill, mixed (default: each).", rich_help_panel=PANEL),
    ] = None
    q_dtype: Annotated[
        str | None, typer.Option(help="Of queries (default: --dtype).", rich_help_panel=PANEL)
    ] = None
    kv_dtype: Annotated[
        list[str] | None,
        typer.Option(help="Of caches: fp8, int8 or the queries'.", rich_help_panel=PANEL),
    ] = None

    def chosen(self, op: str) -> bool:
        """Whether paged attention is asked for.

        Raises:
            UsageError: options of it without it.
        """
        if op == PAGED_ATTENTION:
            return True
        for option in given_of(self):
            raise UsageError(f"{option} belongs to paged attention: add --op paged_attention")
        return False

    def draws(self, recorded: Path | None) -> bool:
        """Return whether batches are drawn, which are spelt out; else captures are read.

        Args:
            recorded: a folder of captures that was asked for, `None` where none was.

        Raises:
            UsageError: both.
        """
        given = given_of(self)
        if given and recorded is not None:
            raise UsageError(f"{given[0]} draws batches: leave it out, or the captures {recorded}")
        return bool(given) or (recorded is None and not DEFAULT_FOLDER.exists())

    def inputs(self, drawn: DrawnInputOptions, tp_size: int = 1) -> list[ReplayInputs]:
        """Return the inputs to draw: decoding, a prompt, and both in one batch, each of its own.

        Args:
            drawn: options of attention, of which some are shared.
            tp_size: devices that share the heads.

        Raises:
            UsageError: no length, an option of attention, or heads that do not divide.
        """
        from sage_plugin.families import describe

        return drawn.drawn((describe(shape), shape) for shape in self.shapes(drawn, tp_size))

    def shapes(self, drawn: ShapeOptions, tp_size: int = 1) -> list[PagedShape]:
        """Return the shapes that are spelt out, of one of `tp_size` devices.

        Raises:
            UsageError: no length, an unknown name, an option of attention, or heads that do not
                divide.
        """
        if other := [option for option in drawn.given() if option not in SHARED]:
            raise UsageError(f"{other[0]} belongs to attention: leave it out")
        if not self.max_model_len:
            raise UsageError(
                "--op paged_attention needs --max-model-len, as --max-model-len 8192,32768, or a "
                "folder that `sage capture --op paged_attention` recorded"
            )
        dtype = dtype_name(self.q_dtype or drawn.dtype or "bf16")
        kinds = [k for text in self.kind or (",".join(PAGED_KINDS),) for k in text.split(",")]
        product = itertools.product(
            (one_of("--kind", kind, PAGED_KINDS) for kind in kinds),
            self._numbers("page_size", "64"),
            self._heads(tp_size),
            self._numbers("max_model_len", ""),
            self._numbers("num_sequences", "35"),
            self._caches(dtype),
        )
        shapes = []
        for kind, page, (heads_q, heads_k), keys, sequences, cache in product:
            rows = _rows(kind, sequences, keys)
            whole = -(-keys // page) * page
            shapes.append(PagedShape(
                rows, (keys,) * len(rows), heads_q, heads_k, drawn.head_dim or 128, dtype, cache,
                page, whole,
            ))  # fmt: skip
        return list(dict.fromkeys(shapes))

    def _numbers(self, name: str, default: str) -> list[int]:
        return lengths(getattr(self, name) or [default], f"--{name.replace('_', '-')}")

    def _heads(self, tp_size: int) -> list[tuple[int, int]]:
        """Query and key heads of one device; key heads that do not divide are on all of them."""
        found = []
        for heads_q, heads_k in itertools.product(
            self._numbers("num_q_heads", "32"), self._numbers("num_kv_heads", "8")
        ):
            if heads_q % heads_k:
                raise UsageError(
                    f"--num-q-heads {heads_q} is not a multiple of --num-kv-heads {heads_k}"
                )
            local = heads_k // tp_size if heads_k % tp_size == 0 else 1
            if heads_q % tp_size or (heads_q // tp_size) % local:
                raise UsageError(f"--tp-size {tp_size} does not divide {heads_q} query heads")
            found.append((heads_q // tp_size, local))
        return found

    def _caches(self, dtype: str) -> list[str]:
        names = [n for text in self.kv_dtype or (dtype,) for n in text.split(",")]
        own = {name: full for name, full in DTYPES.items() if full == dtype} | {dtype: dtype}
        known = own | CACHES | {full: full for full in CACHES.values()}
        return [known[one_of("--kv-dtype", name, tuple(known))] for name in names]


def _rows(kind: str, sequences: int, keys: int) -> tuple[int, ...]:
    """Rows of Q of each sequence."""
    if kind == "prefill":
        return (keys,)
    if kind == "decode":
        return (1,) * sequences
    return (*(1,) * max(1, sequences - 1), max(2, min(keys, CHUNK)))
