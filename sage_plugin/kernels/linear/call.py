"""One linear call as it comes through a door, and what is asked to compute it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.linear.weight import QuantizedWeight
from sage_plugin.kernels.surroundings import autocasts, wants_gradient
from sage_plugin.schema import LinearKey

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class LinearCall(NamedTuple):
    """The arguments of one linear call.

    Attributes:
        x: `(..., K)`.
        weight: `(N, K)`, quantized or not.
        bias: `(N,)`, or `None`.
        out_dtype: dtype of the output, `x`'s if `None`.
    """

    x: torch.Tensor
    weight: torch.Tensor | QuantizedWeight
    bias: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None

    @property
    def matrix(self) -> torch.Tensor:
        """The weight's `(N, K)` tensor."""
        return self.weight.data if isinstance(self.weight, QuantizedWeight) else self.weight

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.x.device

    @property
    def rows(self) -> int:
        """Rows of the input, M."""
        channels = self.x.shape[-1]
        return self.x.numel() // channels if channels else 0

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient has to flow through the call."""
        weight = self.weight
        if isinstance(weight, QuantizedWeight):
            return wants_gradient(self.x, self.bias)
        return wants_gradient(self.x, weight, self.bias)

    def key(self) -> tuple[object, ...]:
        """Return all that an answer follows from: the call without its data."""
        x, weight, bias = self.x, self.weight, self.bias
        of_weight: object
        if isinstance(weight, QuantizedWeight):
            of_weight = weight.signature
        else:
            of_weight = (weight.shape, weight.dtype, weight.device)
        return (
            x.shape, x.dtype, x.device, of_weight, bias is not None and (bias.shape, bias.dtype),
            self.out_dtype, self.needs_grad,
        )  # fmt: skip

    def launch_key(self, kernel: str, backend: str) -> LinearKey:
        """Return the key under which a launch config is looked up."""
        dtype = str(self.x.dtype).removeprefix("torch.")
        out_features, in_features = self.matrix.shape
        return LinearKey(kernel, backend, in_features, out_features, dtype, self.rows)


def check_tensors(*, bias: object, **needed: object) -> None:
    """Raise unless all are dense tensors, and the bias one of floats or `None`.

    Raises:
        UnsupportedInputError: naming the argument that is not.
    """
    for name, tensor in (*needed.items(), *(() if bias is None else (("bias", bias),))):
        if not isinstance(tensor, torch.Tensor):
            raise UnsupportedInputError(f"{name} is {type(tensor).__name__}; give a torch.Tensor")
        if tensor.layout is not torch.strided:
            raise UnsupportedInputError(
                f"{name} is a tensor of layout {tensor.layout}; call .to_dense() on it"
            )
    if isinstance(bias, torch.Tensor) and not bias.is_floating_point():
        raise UnsupportedInputError(f"bias is {bias.dtype}; it needs a floating type")


def check_call(call: LinearCall) -> None:
    """Raise unless the tensors of a call fit together.

    Raises:
        UnsupportedInputError: naming the argument that does not fit.
    """
    x, matrix, bias = call.x, call.matrix, call.bias
    check_tensors(x=x, weight=matrix, bias=bias)
    if matrix.dim() != 2 or x.dim() < 1 or x.shape[-1] != matrix.shape[1]:
        raise UnsupportedInputError(
            f"x {tuple(x.shape)} and weight {tuple(matrix.shape)} do not fit together: the last "
            "dimension of x has to be the second of the weight, (out_features, in_features)"
        )
    if bias is not None and bias.shape != matrix.shape[:1]:
        raise UnsupportedInputError(
            f"bias is {tuple(bias.shape)}; it needs one number for each of {matrix.shape[0]} "
            "out_features"
        )
    if not x.device == matrix.device == (matrix.device if bias is None else bias.device):
        raise UnsupportedInputError(
            f"x is on {x.device}, weight on {matrix.device}"
            + ("" if bias is None else f" and bias on {bias.device}")
            + "; move them to one device"
        )
    out_dtype = call.out_dtype
    if out_dtype is not None and out_dtype not in FLOATS:
        raise UnsupportedInputError(
            f"out_dtype is {out_dtype}; choose one of torch.float16, torch.bfloat16, torch.float32"
        )


def check_dtypes(call: LinearCall) -> None:
    """Raise unless torch's own linear takes the dtypes of a call, which autocast makes equal.

    Raises:
        UnsupportedInputError: they differ.
    """
    x, matrix, bias = call.x, call.matrix, call.bias
    dtypes = {"x": x.dtype, "weight": matrix.dtype} | ({} if bias is None else {"bias": bias.dtype})
    if len(set(dtypes.values())) > 1 and not autocasts(x.device):
        told = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise UnsupportedInputError(
            f"torch's own linear takes tensors of one dtype, and these are {told}; cast them with "
            ".to()"
        )
