"""`grouped_linear()`: the linears of groups of rows, such as the experts of a mixture."""

from __future__ import annotations

import torch

from sage_plugin.kernels.grouped_linear.call import GroupedLinearCall, check_call
from sage_plugin.kernels.grouped_linear.executor import host_grouped_linear, refused, run
from sage_plugin.kernels.grouped_linear.torch_ops import grouped_linear_by_op, traced_product
from sage_plugin.kernels.grouped_linear.weight import GroupedWeight
from sage_plugin.kernels.linear.rows.prologue import NO_PROLOGUE
from sage_plugin.kernels.linear.traced import traced_rows
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.kernels.surroundings import are_plain
from sage_plugin.schema import LinearLaunch

__all__ = ["grouped_linear"]


def grouped_linear(
    x: torch.Tensor,
    weights: torch.Tensor | GroupedWeight,
    group_sizes: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    kernel: str = "auto",
    backend: str = "auto",
    out_dtype: torch.dtype | None = None,
    launch: LinearLaunch | None = None,
) -> torch.Tensor:
    """Linears of groups of rows: `x[rows of g] @ weights[g].T + bias[g]` for each group g.

    The sizes of groups are read on the device alone, so that a CUDA graph may be replayed with
    others. `kernel="auto"` takes the default kernel of the device; a kernel asked for by name
    either runs or raises. On CPU tensors a named kernel runs as its exact emulation, `auto` as
    torch's own product. Each row of `x` and each output channel of each group has a scale; weights
    are quantized at the first call that they are given to.

    Args:
        x: `(T, K)` sorted by group, fp16, bf16 or fp32.
        weights: `(E, N, K)`, or what `quantize_weights` made of them.
        group_sizes: `(E,)` int32 on the same device; 0 for a group without rows.
        bias: `(E, N)`.
        kernel: `"auto"`, `"bf16"` for a product in the dtype of the inputs, `"fp8_row"` or
            `"int8_row"`.
        backend: `"auto"`, `"torch"`, `"triton"` or `"emulation"`, which reads the sizes.
        out_dtype: dtype of the output, `x`'s if `None`.
        launch: launch config of the Triton product in place of the default.

    Returns:
        `(T, N)`, rows beyond the last group 0, whatever `x` has there. A row of `x` that is not
        finite gives a row that is not, and touches no other.

    Raises:
        UnsupportedInputError: arguments that do not fit together, or a named kernel that cannot
            take them.
        UnknownKernelError: no kernel or backend of that name.

    Example:
        >>> import torch, sage_plugin
        >>> x, experts = torch.randn(6, 64), torch.randn(3, 32, 64)
        >>> sizes = torch.tensor([4, 0, 1], dtype=torch.int32)
        >>> out = sage_plugin.grouped_linear(x, experts, sizes, kernel="fp8_row")
        >>> out.shape, bool(out[5].any())
        (torch.Size([6, 32]), False)
    """
    call = GroupedLinearCall(x, weights, group_sizes, bias, out_dtype)
    request = BackendRequest(kernel, backend, launch)
    if any(one is None for one in call[:3]):
        check_call(call)
    if not are_plain(x, call.matrices, group_sizes, bias):
        return _through_torch(call, request)
    return run(call, request)


def _through_torch(call: GroupedLinearCall, request: BackendRequest) -> torch.Tensor:
    """Run a call whose tensors a compiler, a mode or a subclass watches; traceable."""
    check_call(call)
    x, weights = call.x, call.weights
    if call.needs_grad or call.data.numel() == 0:
        if request.kernel not in ("auto", "bf16") and call.needs_grad:
            raise refused(call, request.kernel, "a gradient is needed")
        return host_grouped_linear(call)
    assert isinstance(x, torch.Tensor)
    if isinstance(weights, GroupedWeight):
        rows = traced_rows(x, weights.row_format, None, NO_PROLOGUE)
        return traced_product(rows, weights, call.group_sizes, call.bias, call.dtype)
    return grouped_linear_by_op(call, request)
