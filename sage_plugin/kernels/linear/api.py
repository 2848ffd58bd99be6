"""`linear()` with the parameters of torch's own, and `normalized()` before several of them."""

from __future__ import annotations

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.kernels.linear.activation import can_be_remembered, quantize_norm
from sage_plugin.kernels.linear.call import (
    LinearCall,
    check_call,
    check_tensors,
)
from sage_plugin.kernels.linear.executor import host_linear, resolve, run_by_torch
from sage_plugin.kernels.linear.rows.prologue import (
    NO_PROLOGUE,
    NORMS,
    Prologue,
    check_prologue,
    prologued,
)
from sage_plugin.kernels.linear.traced import traced_linear
from sage_plugin.kernels.linear.weight import QuantizedWeight, quantize_weight
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.kernels.surroundings import are_plain, wants_gradient
from sage_plugin.schema import LinearLaunch

__all__ = ["apply", "linear", "normalized"]

AUTO = BackendRequest()


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    kernel: str = "auto",
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
    launch: LinearLaunch | None = None,
    prologue: Prologue = NO_PROLOGUE,
) -> torch.Tensor:
    """Linear layer `x @ weight.T + bias` on a product of 8-bit numbers.

    `kernel="auto"` takes the default kernel of the device and leaves what gains nothing to torch's
    own linear; a kernel asked for by name either runs or raises. On CPU tensors a named kernel runs
    as its exact emulation. Each row of `x` and each output channel of `weight` has a scale; a
    weight is quantized at the first call that it is given to, an input once for all linears that
    read it in turn.

    Args:
        x: `(..., K)`, fp16, bf16 or fp32.
        weight: `(N, K)`, or what `quantize_weight` made of it.
        bias: `(N,)`.
        kernel: `"auto"`, `"fp8_row"`, `"fp8_tensor"` (one scale for all of `x` and of the weight),
            `"int8_row"`, or `"bf16"` for torch's own linear in the dtype of its inputs.
        backend: `"auto"`, `"torch"`, `"triton"` or `"emulation"`.
        out_dtype: dtype of the output, `x`'s if `None`.
        launch: launch config of the Triton product in place of the default.
        prologue: an activation or a norm before the linear, which quantized kernels compute in the
            pass that quantizes: what it makes is neither rounded to 16 bits nor written to memory.

    Returns:
        `(..., N)`. A row of `x` that is not finite gives a row that is not, and touches no other.

    Raises:
        UnsupportedInputError: arguments that do not fit together, or a named kernel that cannot
            take them.
        UnknownKernelError: no kernel or backend of that name.

    Example:
        >>> import torch, sage_plugin
        >>> x, weight = torch.randn(4, 64), torch.randn(32, 64)
        >>> sage_plugin.linear(x, weight, kernel="fp8_row").shape
        torch.Size([4, 32])
        >>> gelu = sage_plugin.Prologue("gelu_tanh")
        >>> sage_plugin.linear(x, weight, kernel="int8_row", prologue=gelu).shape
        torch.Size([4, 32])
    """
    call = LinearCall(x, weight, bias, out_dtype)
    others: tuple[torch.Tensor | None, ...] = ()
    if x is None or weight is None or prologue is not NO_PROLOGUE:
        check_call(call)
        check_prologue(prologue, x)
        others = prologue.tensors()
        if wants_gradient(*others):
            x, others, prologue = _made(x, prologue), (), NO_PROLOGUE
            call = call._replace(x=x)
    if not are_plain(x, call.matrix, bias, *others):
        return _through_torch(call, kernel, prologue)
    resolved = resolve(call, BackendRequest(kernel, backend, launch))
    if not isinstance(resolved, FallbackReason):
        return resolved.run(call, prologue)
    if kernel != "auto" or isinstance(weight, QuantizedWeight):
        name = weight.kernel if isinstance(weight, QuantizedWeight) else kernel
        raise UnsupportedInputError(
            f"kernel {name!r} cannot take this call: {resolved}; use kernel='auto' with the "
            "original weight for torch's own linear"
        )
    return run_by_torch(call, prologue)


def apply(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    prologue: Prologue = NO_PROLOGUE,
) -> torch.Tensor:
    """Multiply with a quantized weight, in eager mode or in a compiled graph; traceable.

    A call that no quantized kernel takes, such as one that needs a gradient, multiplies with the
    weight as the 8-bit one has it.

    Args:
        x: `(..., K)`.
        weight: the quantized weight.
        bias: `(N,)`.
        out_dtype: dtype of the output, `x`'s if `None`.
        prologue: what comes before, as `linear` takes it.
    """
    others = () if prologue is NO_PROLOGUE else prologue.tensors()
    if others and wants_gradient(*others):
        x, others, prologue = _made(x, prologue), (), NO_PROLOGUE
    if not are_plain(x, bias, *others):
        if not wants_gradient(x, bias) and x.numel() > 0:
            return traced_linear(x, weight, bias, out_dtype, prologue)
    else:
        call = LinearCall(x, weight, bias, out_dtype)
        resolved = resolve(call, AUTO)
        if not isinstance(resolved, FallbackReason):
            return resolved.run(call, prologue)
    return host_linear(_made(x, prologue), weight.dequantized(x.dtype), bias, out_dtype)


def normalized(x: torch.Tensor, norm: Prologue, reader: QuantizedWeight) -> torch.Tensor:
    """Return what a norm makes of `x`, and quantize it for all linears that read it; traceable.

    The linears that get the output next, with weights of the reader's format, find it quantized:
    `to_q`, `to_k` and `to_v` after a modulated norm cost one pass over `x` in all.

    Args:
        x: `(..., K)`.
        norm: the norm.
        reader: the weight of one of the linears that read the output.

    Raises:
        UnsupportedInputError: a norm that does not fit.

    Example:
        >>> import torch, sage_plugin
        >>> x, weight = torch.randn(4, 64), sage_plugin.quantize_weight(torch.eye(64), "int8_row")
        >>> y = sage_plugin.normalized(x, sage_plugin.Prologue("rms_norm"), weight)
        >>> sage_plugin.linear(y, weight).shape
        torch.Size([4, 64])
    """
    _check_norm(x, norm, reader)
    tensors = (x, *norm.tensors())
    eager = are_plain(*tensors) and not wants_gradient(*tensors) and can_be_remembered(x)
    if not eager or x.numel() == 0:
        return _made(x, norm)
    return quantize_norm(x, norm, reader, x.dtype)


def _check_norm(x: torch.Tensor, norm: Prologue, reader: QuantizedWeight) -> None:
    """Raise unless a norm fits its input, and a reader its output.

    Raises:
        UnsupportedInputError: naming the argument that does not fit.
    """
    check_tensors(x=x, bias=None)
    check_prologue(norm, x)
    if norm.kind not in NORMS:
        raise UnsupportedInputError(
            f"norm is {norm.kind!r}; choose one of {', '.join(NORMS)}, and give others to the "
            "prologue of linear()"
        )
    if not isinstance(reader, QuantizedWeight):
        raise UnsupportedInputError(
            f"reader is {type(reader).__name__}; give what quantize_weight made of the weight of a "
            "linear that reads the output"
        )
    if x.shape[-1] != reader.in_features:
        raise UnsupportedInputError(
            f"reader has {reader.in_features} in_features and x {tuple(x.shape)} has "
            f"{x.shape[-1]} channels; give the weight of a linear that reads the output"
        )


def _made(x: torch.Tensor, prologue: Prologue) -> torch.Tensor:
    """What a prologue makes, in the dtype of its input."""
    return x if prologue is NO_PROLOGUE else prologued(x, prologue).to(x.dtype)


def _through_torch(call: LinearCall, kernel: str, prologue: Prologue) -> torch.Tensor:
    """Run a call whose tensors a compiler, a mode or a subclass watches; traceable.

    `auto` is torch's own linear here, unless the weight is quantized.
    """
    x, weight, bias, out_dtype = call
    check_call(call)
    if isinstance(weight, QuantizedWeight):
        return apply(x, weight, bias, out_dtype, prologue)
    if kernel in ("auto", "bf16"):
        return run_by_torch(call, prologue)
    if call.needs_grad:
        raise UnsupportedInputError(
            f"kernel {kernel!r} cannot take this call: a gradient is needed; use kernel='auto'"
        )
    return traced_linear(x, quantize_weight(weight, kernel), bias, out_dtype, prologue)
