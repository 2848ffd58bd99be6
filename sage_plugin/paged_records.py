"""The frozen records of paged attention: launch config, call key, shape of a call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sage_plugin.json_record import JsonRecord
from sage_plugin.key_numbers import NumbersOfKey

PAGED_ATTENTION = "paged_attention"

PAGED_KERNELS = ("fav2", "qk_int8", "qk_fp8")
"""Kernel names of paged attention: Q as it comes, or quantized to the 8-bit type of the cache."""

PAGED_BACKENDS = ("triton", "emulation")

PAGED_KINDS = ("decode", "prefill", "mixed")
"""At most one token for each sequence on average, one sequence, all else; as shapes alone tell."""


def kind_of(tokens: int, sequences: int) -> str:
    """Return the kind of a call of so many rows of Q and so many sequences.

    Example:
        >>> kind_of(4, 4), kind_of(512, 1), kind_of(515, 4)
        ('decode', 'prefill', 'mixed')
    """
    if tokens <= sequences:
        return "decode"
    return "prefill" if sequences <= 1 else "mixed"


@dataclass(frozen=True, slots=True)
class PagedLaunch(JsonRecord):
    """The tunable numbers of one launch of paged attention.

    Attributes:
        block_m: rows of a tile, tokens times the query heads of a key head.
        block_n: keys of a step: some pages, or a part of one.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        splits: programs that share the keys of a tile; 0 for as many as fill the device.
        loads: `"pointer"`, or `"descriptor"` for TMA (sm_90 and newer, steps inside of a page).
        maxnreg: register limit of a thread (NVIDIA), 0 for none.
        waves_per_eu: occupancy hint (AMD), 0 for none.
        matrix_instr_nonkdim: MFMA shape (AMD), 0 for the compiler's choice.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    splits: int = 0
    loads: str = "pointer"
    maxnreg: int = 0
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0


@dataclass(frozen=True, slots=True)
class PagedShape(JsonRecord):
    """The shape of one call of paged attention, causal and without further options.

    Attributes:
        q_lens: rows of Q of each sequence.
        kv_lens: keys of each sequence.
        heads_q: query heads.
        heads_k: key heads.
        head_dim: channels of a head.
        dtype: of Q, as torch spells it, without `torch.`.
        cache_dtype: of the caches, likewise.
        page_size: tokens of a page.
        max_keys: keys that a row of the page table has place for.
    """

    family: ClassVar[str] = PAGED_ATTENTION

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads_q: int
    heads_k: int
    head_dim: int
    dtype: str
    cache_dtype: str
    page_size: int
    max_keys: int

    @property
    def tokens(self) -> int:
        """Rows of Q."""
        return sum(self.q_lens)

    @property
    def kind(self) -> str:
        """One of `PAGED_KINDS`."""
        return kind_of(self.tokens, len(self.q_lens))


@dataclass(frozen=True, slots=True)
class PagedKey(NumbersOfKey, JsonRecord):
    """What is known of a call of paged attention without its data.

    Attributes:
        kernel: kernel name (`PAGED_KERNELS`).
        variant: backend name (`PAGED_BACKENDS`).
        kind: one of `PAGED_KINDS`.
        head_dim: channels of a head.
        gqa_ratio: query heads per key head.
        dtype: of Q, as torch spells it, without `torch.`.
        cache_dtype: of the caches, likewise.
        page_size: tokens of a page.
        tokens: rows of Q.
        max_keys: keys that a row of the page table has place for.
        sequences: rows of the page table.
        heads_k: key heads.
    """

    family: ClassVar[str] = PAGED_ATTENTION
    NUMBERS: ClassVar[tuple[str, ...]] = ("tokens", "max_keys", "sequences", "heads_k")
    LENGTHS: ClassVar[tuple[str, ...]] = ("tokens", "max_keys")

    kernel: str
    variant: str
    kind: str
    head_dim: int
    gqa_ratio: int
    dtype: str
    cache_dtype: str
    page_size: int
    tokens: int
    max_keys: int
    sequences: int
    heads_k: int
