"""Weights of grouped linears in 8 bits, quantized once for each group and output channel."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sage_plugin.errors import UnknownKernelError, UnsupportedInputError
from sage_plugin.kernels.linear.rows.row_format import RowFormat
from sage_plugin.kernels.linear.weight import QuantizedWeight, quantize_weight, shape_or_type
from sage_plugin.kernels.linear.weight_memo import quantized_once
from sage_plugin.schema import GROUPED_LINEAR_KERNELS


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """The weights of a grouped linear in 8 bits.

    Attributes:
        rows: all output channels of all groups, one below the other.
        groups: number of groups, E.
        data: `(E, N, K)`.
        scale: `(E, N)` fp32.
    """

    rows: QuantizedWeight
    groups: int
    data: torch.Tensor = field(init=False, repr=False)
    scale: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", self.rows.data.unflatten(0, (self.groups, -1)))
        object.__setattr__(self, "scale", self.rows.scale.view(self.groups, -1))

    @property
    def kernel(self) -> str:
        """The kernel that multiplies it."""
        return self.rows.kernel

    @property
    def row_format(self) -> RowFormat:
        """The format of the rows that it is multiplied with."""
        return self.rows.row_format

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return self.rows.nbytes

    def to(self, device: torch.device | str) -> GroupedWeight:
        """Return the weights on a device."""
        return GroupedWeight(self.rows.to(device), self.groups)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the `(E, N, K)` weights that the 8-bit ones stand for.

        Example:
            >>> quantize_weights(torch.eye(16).expand(2, 16, 16), "int8_row").dequantized().sum()
            tensor(32.)
        """
        return self.rows.dequantized(dtype).unflatten(0, (self.groups, -1))


def quantize_weights(weights: torch.Tensor, kernel: str) -> GroupedWeight:
    """Quantize the weights of a grouped linear, one scale for each group and output channel.

    Args:
        weights: `(E, N, K)` on the device that multiplies them, any floating type.
        kernel: `"fp8_row"` or `"int8_row"`.

    Raises:
        UnknownKernelError: the kernel does not exist or does not quantize.
        UnsupportedInputError: weights that are not three-dimensional, or not floating.

    Example:
        >>> quantize_weights(torch.randn(4, 32, 64), "fp8_row").nbytes
        8704
    """
    _check(weights, kernel)
    return GroupedWeight(quantize_weight(weights.flatten(0, 1), kernel), weights.shape[0])


def quantized_weights_once(weights: torch.Tensor, kernel: str) -> GroupedWeight:
    """Return the quantized form of weights; made anew if they were written since."""
    return quantized_once(weights, kernel, quantize_weights)


def _check(weights: torch.Tensor, kernel: str) -> None:
    quantized = GROUPED_LINEAR_KERNELS[1:]
    if kernel not in quantized:
        raise UnknownKernelError(
            f"kernel {kernel!r} quantizes no grouped linear; choose one of {', '.join(quantized)}"
        )
    if not isinstance(weights, torch.Tensor) or weights.dim() != 3 or weights.numel() == 0:
        raise UnsupportedInputError(
            f"weights is {shape_or_type(weights)}; it needs three dimensions, (groups, "
            "out_features, in_features)"
        )
