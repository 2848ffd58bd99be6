"""What an attention call costs: floating-point operations, and bytes that must move."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from sage_plugin.kernels.attention.mask import mask_kind
from sage_plugin.kernels.attention.visibility import hidden_by_mask, hidden_by_position
from sage_plugin.kernels.contract import AttentionParams, Operands
from sage_plugin.measure.inputs import torch_dtype
from sage_plugin.schema import CallShape

NOT_READ = ("q", "k", "v", "shift", "poison")
"""Fields of quantised operands that the timed kernel does not read: the caller's tensors, and what
only a log-sum-exp or an emulation needs."""

KEY_TERM = "key_term"
"""What a key adds to every score; read where rows differ in the keys that they see."""

CHUNK_ELEMENTS = 1 << 26
"""Mask values looked at together."""


def visible_pairs(seq_q: int, seq_k: int, *, causal: bool) -> int:
    """Count the query-key pairs that attention weighs: all, or those of a causal mask.

    The mask is aligned at the bottom right.

    Example:
        >>> visible_pairs(3, 3, causal=True), visible_pairs(2, 4, causal=True)
        (6, 7)
        >>> visible_pairs(4, 2, causal=True)
        3
    """
    if not causal:
        return seq_q * seq_k
    # The last min(Sq, Sk) rows see something: Sk, Sk - 1, ... keys, counted from the last row.
    rows = min(seq_q, seq_k)
    return rows * seq_k - rows * (rows - 1) // 2


def weighed_pairs(shape: CallShape, mask: torch.Tensor | None = None) -> int:
    """Count the visible pairs of all batch items and query heads, in the mask itself.

    Args:
        shape: the call.
        mask: (B or 1, Hq or 1, Sq or 1, Sk), as kernels take it; `None` counts as no mask.

    Example:
        >>> from sage_plugin.measure.inputs import self_attention
        >>> keep = torch.tensor([True, True, False]).view(1, 1, 1, 3)
        >>> weighed_pairs(self_attention(1, 2, 3, 8), keep)
        12
    """
    if mask is None:
        pairs = visible_pairs(shape.seq_q, shape.seq_k, causal=shape.causal)
        return shape.batch * shape.heads_q * pairs
    served = (shape.batch // mask.shape[0]) * (shape.heads_q // mask.shape[1])
    counted = _pairs_of_keys if mask_kind(mask) == "key_bias" else _pairs_of_tiles
    return served * counted(shape, mask)


def _pairs_of_keys(shape: CallShape, mask: torch.Tensor) -> int:
    """Pairs in a mask with one row for all: each visible key times the rows that may see it."""
    first = torch.zeros(shape.seq_k, dtype=torch.int64, device=mask.device)
    if shape.causal:
        keys = torch.arange(shape.seq_k, device=mask.device)
        first = (keys - (shape.seq_k - shape.seq_q)).clamp(0, shape.seq_q)
    return int((~hidden_by_mask(mask[:, :, 0]) * (shape.seq_q - first)).sum().item())


def _pairs_of_tiles(shape: CallShape, mask: torch.Tensor) -> int:
    """Pairs in a dense mask, a chunk of rows at a time."""
    total = 0
    step = max(1, CHUNK_ELEMENTS // (mask.shape[0] * mask.shape[1] * shape.seq_k))
    for start in range(0, shape.seq_q, step):
        seen = ~hidden_by_mask(mask[:, :, start : start + step])
        out_of_reach = hidden_by_position(
            torch.arange(start, start + seen.shape[2], device=mask.device), 0, shape.seq_k,
            seq_q=shape.seq_q, seq_k=shape.seq_k, left=-1, right=0 if shape.causal else -1,
        )  # fmt: skip
        seen = seen if out_of_reach is None else seen & ~out_of_reach
        total += int(seen.sum().item())
    return total


def flops(shape: CallShape, mask: torch.Tensor | None = None) -> int:
    """Count multiplications and additions of both products: `2 (Dqk + Dv)` for each visible pair.

    Example:
        >>> from sage_plugin.measure.inputs import presets
        >>> round(flops(presets()["cogvideox-2b"]) / 1e12, 2)
        4.85
    """
    return 2 * (shape.head_dim + shape.dv) * weighed_pairs(shape, mask)


def moved_bytes(operands: Operands, shape: CallShape) -> int:
    """Count the bytes of each operand, scale and mask read once, and the output written once.

    A mask counts as it lies in memory: one entry for all heads is read once. Where quantising has
    turned it into a term a key, that is read instead.
    """
    own = {n: t for n, t in _tensors(operands) if not n.startswith("problem.")}
    tensors = _quantized(operands) or own
    problem = getattr(operands, "problem", None)
    mask = problem.mask if isinstance(problem, AttentionParams) else None
    tensors.pop("k_scale_finite", None)  # a kernel reads these K scales or the others
    if mask is not None:
        by_key = KEY_TERM in tensors and mask_kind(mask) == "key_bias" and mask.shape[1] == 1
        tensors |= {} if by_key else {"mask": mask}
    elif not shape.causal:
        tensors.pop(KEY_TERM, None)
    read = {(t.data_ptr(), t.dtype): t for t in tensors.values()}
    output = shape.batch * shape.heads_q * shape.seq_q * shape.dv
    element_size = torch_dtype(shape.dtype).itemsize
    return sum(t.numel() * t.element_size() for t in read.values()) + output * element_size


def quantizes(operands: Operands) -> bool:
    """Tell whether `prepare` made anything but a note of the caller's tensors."""
    return bool(_quantized(operands))


def _quantized(operands: Operands) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for name, tensor in _tensors(operands)
        if not name.startswith("problem.") and name.rpartition(".")[2] not in NOT_READ
    }


def _tensors(record: object, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a dataclass, and of the dataclasses and tuples in it, by dotted field name."""
    parts: list[tuple[str, object]] = []
    if isinstance(record, tuple):
        parts = [(str(i), value) for i, value in enumerate(record)]
    elif dataclasses.is_dataclass(record):
        parts = [(field.name, getattr(record, field.name)) for field in dataclasses.fields(record)]
    for own_name, value in parts:
        name = f"{prefix}{own_name}"
        if isinstance(value, torch.Tensor):
            yield name, value
        else:
            yield from _tensors(value, f"{name}.")
