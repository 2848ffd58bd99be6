"""Correct casts for Triton's CPU interpreter.

Stock interpreters (3.6 to 3.9) round fp32 to FP8 wrongly, truncate fp32 to bf16, and multiply bf16
dots as raw integers; with numpy 2.4 and newer they also fail on loop bounds that are tensors.
`correct_casts()` replaces these places; what the kernels compute is then what a GPU computes, up to
the order of sums.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

TORCH_TYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
UNSIGNED = {1: np.uint8, 2: np.uint16}


def correct_casts() -> None:
    """Patch the interpreter of the installed Triton, once."""
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "_sage_casts", False):
        return
    interpreter._sage_casts = True
    stock = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if str(source) not in TORCH_TYPES or str(target) not in TORCH_TYPES:
            return stock(data, source, target, rounding)
        return _from_torch(_to_torch(data, str(source)), str(target))

    interpreter._convert_float = convert
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    @functools.wraps(dot)
    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if str(a.dtype.scalar) == "bf16":
            a, b = self.create_fp_ext(a, tl.float32), self.create_fp_ext(b, tl.float32)
        return dot(self, a, b, *rest)

    builder.create_dot = create_dot
    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


def _to_torch(data: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    dtype = TORCH_TYPES[name]
    raw = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).copy()).view(dtype)
    return raw.reshape(data.shape).float()


def _from_torch(values: torch.Tensor, name: str) -> np.ndarray[Any, Any]:
    dtype = TORCH_TYPES[name]
    if dtype.itemsize == 1:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    cast = values.to(dtype).contiguous()
    if name in ("fp32", "fp16"):
        return cast.numpy()
    return cast.view(torch.uint8).numpy().view(UNSIGNED[dtype.itemsize]).reshape(values.shape)
