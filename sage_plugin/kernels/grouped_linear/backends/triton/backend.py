"""The Triton backend of grouped linears, with one launch config."""

from __future__ import annotations

import torch

from sage_plugin.kernels.grouped_linear.backends.triton.products import multiply_groups_triton
from sage_plugin.kernels.grouped_linear.operands import GroupedOperands
from sage_plugin.schema import LinearLaunch


class GroupedTritonProducts:
    """Multiplies by our own kernel.

    Attributes:
        launch: the launch config.
    """

    def __init__(self, launch: LinearLaunch) -> None:
        self.launch = launch

    def multiply(self, operands: GroupedOperands, out_dtype: torch.dtype) -> torch.Tensor:
        """Multiply rows with the weight of their group, `(T, N)`."""
        return multiply_groups_triton(operands, out_dtype, self.launch)
