"""What a linear costs: floating-point operations, and bytes that must move."""

from __future__ import annotations

from sage_plugin.kernels.linear.rows.quantized import QuantizedRows
from sage_plugin.kernels.linear.weight import QuantizedWeight
from sage_plugin.schema import LinearShape

BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def flops(shape: LinearShape) -> int:
    """Count multiplications and additions of the product.

    Example:
        >>> flops(LinearShape(2, 3, 4, "bfloat16"))
        48
    """
    return 2 * shape.rows * shape.in_features * shape.out_features


def weight_values(shape: LinearShape) -> int:
    """Count the numbers of the weights.

    Example:
        >>> weight_values(LinearShape(2, 3, 4, "bfloat16", groups=5))
        60
    """
    return max(1, shape.groups) * shape.in_features * shape.out_features


def moved_bytes(shape: LinearShape) -> int:
    """Count the bytes that a linear in the dtype of its input moves at least.

    Example:
        >>> moved_bytes(LinearShape(2, 3, 4, "bfloat16"))
        52
    """
    values = shape.rows * (shape.in_features + shape.out_features)
    return BYTES[shape.dtype] * (values + weight_values(shape))


def output_bytes(shape: LinearShape) -> int:
    """Count the bytes of the output in the dtype of the input."""
    return BYTES[shape.dtype] * shape.rows * shape.out_features


def product_bytes(rows: QuantizedRows, weight: QuantizedWeight, shape: LinearShape) -> int:
    """Count the bytes that the product of quantized rows moves at least, with its scales."""
    of_rows = (rows.data, rows.scale, rows.offset, rows.sums)
    read = sum(one.nbytes for one in (*of_rows, *weight.tensors()) if one is not None)
    smooth = 0 if weight.smooth is None else weight.smooth.nbytes
    return read - smooth + output_bytes(shape)
