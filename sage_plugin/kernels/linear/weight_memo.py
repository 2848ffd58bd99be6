"""Weights that are given unquantized, call after call, are quantized once."""

from __future__ import annotations

import threading
import weakref

import torch

from sage_plugin.kernels.linear.weight import QuantizedWeight, quantize_weight

_lock = threading.Lock()
_known: dict[int, dict[str, tuple[weakref.ref[torch.Tensor], object, QuantizedWeight]]] = {}


def quantized_once(weight: torch.Tensor, kernel: str) -> QuantizedWeight:
    """Return the quantized form of a weight; made anew if the weight was written since.

    It is kept for as long as the weight lives.

    Args:
        weight: `(N, K)`.
        kernel: a quantized kernel.
    """
    if weight.is_inference():  # its writes do not show
        return quantize_weight(weight, kernel)
    at, version = id(weight), (weight._version, weight.shape, weight.stride(), weight.data_ptr())
    found = _known.get(at, {}).get(kernel)
    if found is not None and found[0]() is weight and found[1] == version:
        return found[2]
    made = quantize_weight(weight, kernel)
    with _lock:
        of_weight = _known.get(at)
        if of_weight is None:
            of_weight = _known[at] = {}
            weakref.finalize(weight, _known.pop, at, None).atexit = False
        of_weight[kernel] = (weakref.ref(weight), version, made)
    return made
