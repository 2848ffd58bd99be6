"""Correct casts for Triton's CPU interpreter, and less of its work.

Stock interpreters (3.6 to 3.9) round fp32 to FP8 wrongly, truncate fp32 to bf16, and multiply bf16
dots as raw integers; with numpy 2.4 and newer they also fail on loop bounds that are tensors.
`correct_casts()` replaces these places; what the kernels compute is then what a GPU computes, up to
the order of sums. Of its time it spends a third on replacing the whole language again at each call
of a device function, and a fifth on sums that overflow; both are done once here, or at once.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from tests.fast_interpreter import make_types_once

TORCH_TYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5": torch.float8_e5m2,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
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
    make_types_once(interpreter)
    _patch_once(interpreter)
    _check_overflow_at_once(interpreter)


def _patch_once(interpreter: Any) -> None:
    """Replace the language for a module of device functions once a launch, not once a call."""
    seen: set[int] = set()
    executor = interpreter.GridExecutor
    run = executor.__call__

    def launch(self: Any, *args: Any, **options: Any) -> Any:
        seen.clear()
        return run(self, *args, **options)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in seen:
            interpreter._patch_lang(self.fn)
            seen.add(module)
        try:
            return self.rewrite()(*args, **options)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    executor.__call__ = launch
    interpreter.InterpretedFunction.__call__ = call


def _check_overflow_at_once(interpreter: Any) -> None:
    """See whether an integer sum or product overflows by one wide sum, not by ten small steps."""
    from triton.language.semantic import TritonSemantic

    stock = TritonSemantic.binary_op_sanitize_overflow_impl

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        exact = EXACT.get(binary_op.__name__)
        if exact is None or not isinstance(self.builder, interpreter.InterpreterBuilder):
            stock(self, lhs, rhs, binary_op)
            return
        kind = lhs.type.scalar
        if kind.int_bitwidth >= 64:
            return
        wide = exact(lhs.handle.data, rhs.handle.data, dtype=np.int64)
        if wide.size and not (
            kind.get_int_min_value() <= wide.min() and wide.max() <= kind.get_int_max_value()
        ):
            raise AssertionError(f"int{kind.int_bitwidth} overflow in {binary_op.__name__}")

    TritonSemantic.binary_op_sanitize_overflow_impl = check


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
