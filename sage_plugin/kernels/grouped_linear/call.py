"""One grouped linear as it comes through a door."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.grouped_linear.weight import GroupedWeight
from sage_plugin.kernels.linear.call import FLOATS, check_tensors
from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.surroundings import wants_gradient
from sage_plugin.schema import LinearKey


class GroupedLinearCall(NamedTuple):
    """The arguments of one grouped linear.

    Attributes:
        x: `(T, K)` sorted by group, or its rows in the format of quantized weights.
        weights: `(E, N, K)`, quantized or not.
        group_sizes: `(E,)` int32, rows of each group.
        bias: `(E, N)`, or `None`.
        out_dtype: dtype of the output, `x`'s if `None`; given where `x` is quantized.
    """

    x: torch.Tensor | QuantizedRows
    weights: torch.Tensor | GroupedWeight
    group_sizes: torch.Tensor
    bias: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None

    @property
    def data(self) -> torch.Tensor:
        """The `(T, K)` tensor of the input."""
        return self.x.data if isinstance(self.x, QuantizedRows) else self.x

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.data.device

    @property
    def matrices(self) -> torch.Tensor:
        """The `(E, N, K)` tensor of the weights."""
        return self.weights.data if isinstance(self.weights, GroupedWeight) else self.weights

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the output."""
        return self.out_dtype or self.data.dtype

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient has to flow through the call."""
        given = (x for x in (self.x, self.weights, self.bias) if isinstance(x, torch.Tensor))
        return wants_gradient(*given)

    def key(self) -> tuple[object, ...]:
        """Return all that an answer follows from: the call without its data."""
        data, weights, bias, sizes = self.data, self.weights, self.bias, self.group_sizes
        of_weights: object
        if isinstance(weights, GroupedWeight):
            of_weights = (weights.rows.signature, weights.groups)
        else:
            of_weights = (weights.shape, weights.dtype, weights.device)
        return (
            data.shape, data.dtype, data.device, of_weights, self.out_dtype, self.needs_grad,
            sizes.shape, sizes.dtype, sizes.device, bias is not None and (bias.shape, bias.device),
        )  # fmt: skip

    def launch_key(self, kernel: str, backend: str) -> LinearKey:
        """Return the key under which a launch config is looked up."""
        dtype = str(self.dtype).removeprefix("torch.")
        groups, out_features, in_features = self.matrices.shape
        rows = self.data.shape[0]
        return LinearKey(kernel, backend, in_features, out_features, dtype, rows, groups)


def check_call(call: GroupedLinearCall) -> None:
    """Raise unless the tensors of a call fit together.

    Raises:
        UnsupportedInputError: naming the argument that does not fit.
    """
    x, weights, sizes, bias = call.data, call.matrices, call.group_sizes, call.bias
    named = {"x": x, "weights": weights, "group_sizes": sizes, "bias": bias}
    check_tensors(**named)
    for name, tensor, quantized in (
        ("x", x, isinstance(call.x, QuantizedRows)),
        ("weights", weights, isinstance(call.weights, GroupedWeight)),
    ):
        if tensor.dtype not in FLOATS and not quantized:
            raise UnsupportedInputError(
                f"{name} is {tensor.dtype}; cast it to one of torch.float16, torch.bfloat16, "
                "torch.float32"
            )
    if weights.dim() != 3 or x.dim() != 2 or x.shape[1] != weights.shape[2]:
        raise UnsupportedInputError(
            f"x {tuple(x.shape)} and weights {tuple(weights.shape)} do not fit together: they need "
            "to be (rows, in_features) and (groups, out_features, in_features)"
        )
    if sizes.shape != weights.shape[:1] or sizes.dtype != torch.int32:
        raise UnsupportedInputError(
            f"group_sizes is {tuple(sizes.shape)} of {sizes.dtype}; it needs one torch.int32 for "
            f"each of {weights.shape[0]} groups"
        )
    if bias is not None and bias.shape != weights.shape[:2]:
        raise UnsupportedInputError(
            f"bias is {tuple(bias.shape)}; it needs to be {tuple(weights.shape[:2])}, one number "
            "for each group and out_feature"
        )
    places = {name: tensor.device for name, tensor in named.items() if tensor is not None}
    if len(set(places.values())) > 1:
        told = ", ".join(f"{name} on {place}" for name, place in places.items())
        raise UnsupportedInputError(
            f"the tensors are on several devices ({told}); move them to one"
        )
    if isinstance(call.x, QuantizedRows) and call.out_dtype is None:
        raise UnsupportedInputError("out_dtype is None; quantized rows need one of the output")
    if call.out_dtype not in (None, *FLOATS):
        raise UnsupportedInputError(
            f"out_dtype is {call.out_dtype}; choose one of torch.float16, torch.bfloat16, "
            "torch.float32"
        )
