"""What the pre-pass gets: records of values and pointers, and of what it is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class PrepassConfig:
    """What the pre-pass is compiled for.

    Attributes:
        HEAD_DIM: channels of a head; BLOCK_D is the same padded to a power of two.
        BLOCK_M: rows that attention takes at once, BLOCK_N keys; Q_ROWS rows of a program here.
        ROWS: keys of a tile of a program that adds up, which has DEPTH of them in flight.
        CHUNK: records that are added up at once.
        ARRIVALS: what a program counts for.
        QK8: whether Q and K become INT8; QMAX is the largest number of their type.
        TINY: smallest magnitude of a granule.
        PV8: whether V becomes FP8; VMAX is the largest number of its type.
        LIMIT: what the largest value becomes; FLOOR the smallest that needs no scale in fp16.
        K_MEAN: whether K loses its mean; V_MEAN V.
        MASKED, LEFT, PACKED: whether a call has a mask, a window before a row, packed sequences.
        TURNS: passes of the rotation.
        GRANULE: rows that share a scale.
        SHIFT: whether q . mean(K) is stored.
        QUERIES: whether queries are quantized too.
        PHASE: 0 for all in one launch; 1 and 2 for the first and the second of two.
    """

    HEAD_DIM: int
    BLOCK_D: int
    BLOCK_M: int
    BLOCK_N: int
    Q_ROWS: int
    ROWS: int
    DEPTH: int
    CHUNK: int
    ARRIVALS: int
    QK8: bool
    QMAX: float
    TINY: float
    PV8: bool
    VMAX: float
    LIMIT: float
    FLOOR: float
    K_MEAN: bool
    V_MEAN: bool
    MASKED: bool
    LEFT: bool
    TURNS: int
    GRANULE: int
    PACKED: bool
    SHIFT: bool
    QUERIES: bool
    PHASE: int


class PrepassOutputs(NamedTuple):
    """Where operands go: see `QuantizedOperands`."""

    q8: Any
    k8: Any
    v8: Any
    q_scale: Any
    shift: Any
    k_scale: Any
    k_scale_finite: Any
    key_term: Any


class HeadStatistics(NamedTuple):
    """Means and scales of each head, and what tells that they are there."""

    k_mean: Any
    v_mean: Any
    v_scale: Any
    v_unit: Any
    v_residual: Any
    v_drifts: Any
    records: Any
    counters: Any


class KeyMaskStrides(NamedTuple):
    """Strides of a mask of whole keys."""

    batch: Any
    head: Any
    key: Any


class PrepassTensors(NamedTuple):
    """What a launch points to."""

    q: Any
    k: Any
    v: Any
    outputs: Any
    statistics: Any
    key_mask: Any
    cu_seqlens: Any


class PrepassStrides(NamedTuple):
    """Strides of what is read."""

    q: Any
    k: Any
    v: Any
    mask: Any


class PrepassSizes(NamedTuple):
    """Numbers of a call, in a kernel; `heads` are those of keys."""

    heads: Any
    ratio: Any
    seq_q: Any
    seq_k: Any
    left: Any
    q_rows: Any


class PrepassParts(NamedTuple):
    """How the keys of a head are cut, in a kernel: see `schedule`."""

    parts: Any
    groups: Any
    group_parts: Any
    part_keys: Any


class KeyBlock(NamedTuple):
    """Where one block of keys and values goes, in a kernel."""

    k8: Any
    k_scale: Any
    k_scale_finite: Any
    key_term: Any
    v8: Any
    v_residual: Any


class HeadMeans(NamedTuple):
    """Means and scale of one head, in a kernel."""

    k_mean: Any
    v_mean: Any
    v_scale: Any
