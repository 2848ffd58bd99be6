"""How rows are quantized, of activations and of weights alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_plugin.errors import UnknownKernelError, UnsupportedInputError
from sage_plugin.schema import LINEAR_KERNELS

ROTATIONS = (0, 16, 32, 64, 128, 256)
"""Blocks of input channels that may be rotated together; 0 is none."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The form that rows of K channels take.

    Attributes:
        dtype: 8-bit type of the values.
        per_tensor: one scale for all rows in place of one a row.
        rotation: channels of a block that is rotated (Hadamard) before it is quantized, 0 for none.
        asymmetric: values stand for `scale * value + offset`, so that rows far from 0 use all of
            the type's range.
    """

    dtype: torch.dtype
    per_tensor: bool = False
    rotation: int = 0
    asymmetric: bool = False

    @property
    def limit(self) -> float:
        """The value that the largest magnitude is mapped to."""
        return 127.0 if self.dtype == torch.int8 else float(torch.finfo(self.dtype).max)


def row_format(
    kernel: str,
    *,
    fp8: torch.dtype = torch.float8_e4m3fn,
    rotation: int = 0,
    asymmetric: bool = False,
) -> RowFormat:
    """Return the format of a quantized kernel's operands.

    Args:
        kernel: `"fp8_row"`, `"fp8_tensor"` or `"int8_row"`.
        fp8: FP8 type of the device's matrix units.
        rotation: block of `ROTATIONS`.
        asymmetric: with offsets, `int8_row` only.

    Raises:
        UnknownKernelError: the kernel does not exist or does not quantize.
        UnsupportedInputError: a rotation that does not exist, or offsets of FP8 values.

    Example:
        >>> row_format("int8_row").limit
        127.0
    """
    if kernel not in LINEAR_KERNELS or kernel == "bf16":
        raise UnknownKernelError(
            f"kernel {kernel!r} quantizes no linear; choose one of {', '.join(LINEAR_KERNELS[1:])}"
        )
    if rotation not in ROTATIONS:
        raise UnsupportedInputError(
            f"rotation {rotation!r} is not one of {', '.join(map(str, ROTATIONS))}"
        )
    if asymmetric and kernel != "int8_row":
        raise UnsupportedInputError(
            f"asymmetric needs kernel='int8_row', and this is {kernel!r}: FP8 values have their "
            "precision around 0"
        )
    return RowFormat(
        torch.int8 if kernel == "int8_row" else fp8, kernel == "fp8_tensor", rotation, asymmetric
    )


def rotation_of(channels: int, most: int) -> int:
    """Return the largest block of rotated channels that divides K, 0 if none does.

    Args:
        channels: K.
        most: channels of a block at most.

    Example:
        >>> rotation_of(576, 256), rotation_of(3072, 128), rotation_of(20, 256)
        (64, 128, 0)
    """
    return max(block for block in ROTATIONS if block <= most and channels % max(block, 1) == 0)
