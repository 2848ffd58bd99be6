"""Weights that are given unquantized, call after call, are quantized once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Made = TypeVar("Made")

_lock = threading.Lock()
_known: dict[int, dict[str, tuple[weakref.ref[torch.Tensor], object, Any]]] = {}


def quantized_once(
    weight: torch.Tensor, kernel: str, quantize: Callable[[torch.Tensor, str], Made]
) -> Made:
    """Return the quantized form of a weight; made anew if the weight was written since.

    It is kept for as long as the weight lives.

    Args:
        weight: of a linear, or of a grouped one.
        kernel: a quantized kernel.
        quantize: what quantizes a weight for a kernel.
    """
    if weight.is_inference():  # its writes do not show
        return quantize(weight, kernel)
    at, version = id(weight), (weight._version, weight.shape, weight.stride(), weight.data_ptr())
    found = _known.get(at, {}).get(kernel)
    if found is not None and found[0]() is weight and found[1] == version:
        known: Made = found[2]
        return known
    made = quantize(weight, kernel)
    with _lock:
        of_weight = _known.get(at)
        if of_weight is None:
            of_weight = _known[at] = {}
            weakref.finalize(weight, _known.pop, at, None).atexit = False
        of_weight[kernel] = (weakref.ref(weight), version, made)
    return made
