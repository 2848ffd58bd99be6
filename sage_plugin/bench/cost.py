"""What an attention call costs: floating-point operations, and bytes that must move."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from sage_plugin.kernels.contract import Operands
from sage_plugin.measure.inputs import torch_dtype
from sage_plugin.schema import CallShape

NOT_READ = ("q", "k", "v", "shift")
"""Fields of quantised operands that the timed kernel does not read: the caller's tensors, and what
only a log-sum-exp needs."""


def visible_pairs(seq_q: int, seq_k: int, *, causal: bool) -> int:
    """Query-key pairs that attention weighs: all, or those of a bottom-right aligned causal mask.

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


def flops(shape: CallShape) -> int:
    """Multiplications and additions of both products: `2 B Hq (Dqk + Dv) pairs`.

    Example:
        >>> from sage_plugin.measure.inputs import presets
        >>> round(flops(presets()["cogvideox-2b"]) / 1e12, 2)
        4.85
    """
    pairs = visible_pairs(shape.seq_q, shape.seq_k, causal=shape.causal)
    return 2 * shape.batch * shape.heads_q * (shape.head_dim + shape.dv) * pairs


def moved_bytes(operands: Operands, shape: CallShape) -> int:
    """Each operand and scale read once, and the output written once, by their true sizes.

    Args:
        operands: what `prepare` made.
        shape: the call; its output has the dtype of its inputs.
    """
    tensors = _quantised(operands) or dict(_tensors(operands))
    read = {(t.data_ptr(), t.dtype): t for t in tensors.values()}
    output = shape.batch * shape.heads_q * shape.seq_q * shape.dv
    element_size = torch_dtype(shape.dtype).itemsize
    return sum(t.numel() * t.element_size() for t in read.values()) + output * element_size


def is_quantised(operands: Operands) -> bool:
    """Whether `prepare` made anything but a note of the caller's tensors."""
    return bool(_quantised(operands))


def _quantised(operands: Operands) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in _tensors(operands) if name not in NOT_READ}


def _tensors(record: object, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a dataclass and of the dataclasses in it, by dotted field name."""
    if not dataclasses.is_dataclass(record):
        return
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        name = f"{prefix}{field.name}"
        if isinstance(value, torch.Tensor):
            yield name, value
        else:
            yield from _tensors(value, f"{name}.")
