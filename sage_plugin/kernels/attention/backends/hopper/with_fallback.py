"""A Hopper variant with the portable one behind it, for what Gluon cannot build or do."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from typing import Any

import torch

from sage_plugin.kernels.attention.backends.triton.launch import QuantizedPortable
from sage_plugin.kernels.attention.launch_space import default_config
from sage_plugin.kernels.build_error import build_failure
from sage_plugin.kernels.contract import NO_WINDOW, AttentionParams
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.kernels.notice import warn_once
from sage_plugin.kernels.quantize.operands import QuantizedOperands
from sage_plugin.kernels.quantize.recipe import Recipe
from sage_plugin.kernels.quantize.triton.key_mask import by_key
from sage_plugin.kernels.support import HOPPER_ARCH
from sage_plugin.schema import LaunchConfig

logger = logging.getLogger(__name__)


class HopperOrPortable(QuantizedPortable):
    """The Hopper variant of a kernel, and the portable one where its launch config cannot be built.

    Gluon is experimental and its names move, so that a release of Triton may not build it. Both
    variants take the same operands.
    """

    def __init__(self, kernel: str, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.kernel = kernel
        self._unbuilt: dict[tuple[LaunchConfig, int], FallbackReason] = {}

    @property
    def reason(self) -> FallbackReason | None:
        """Why the Hopper variant could not be built the first time; `None` while it can be."""
        return next(iter(self._unbuilt.values()), None)

    def config_for(
        self, launch: LaunchConfig, problem: AttentionParams, head_dim: int
    ) -> LaunchConfig:
        """Return blocks of the portable variant where the decision table was not asked.

        A caller that knows the shape of a call alone, such as a tuner, may ask for the Hopper
        variant of one that has a window, a cap, sinks, packed sequences or a mask of rows.
        """
        return launch if _takes(problem) else _portable_config(self.kernel, launch, head_dim)

    def launch(
        self,
        operands: QuantizedOperands,
        *,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One launch of attention on the quantised operands."""
        if _takes(operands.problem) and not self._failed(operands):
            try:
                return self.first_choice.launch(
                    operands, out_dtype=out_dtype, return_lse=return_lse
                )
            except Exception as error:
                reason = build_failure(error)
                if reason is None:
                    raise
                self._unbuilt[operands.launch_config, operands.head_dim] = reason
                warn_once(
                    logger, (self.kernel, reason),
                    "%s runs on its portable variant, since %s", self.kernel, reason,
                )  # fmt: skip
        config = _portable_config(self.kernel, operands.launch_config, operands.head_dim)
        portable = dataclasses.replace(operands, launch_config=config)
        return super().launch(portable, out_dtype=out_dtype, return_lse=return_lse)

    def _failed(self, operands: QuantizedOperands) -> bool:
        """Whether the Hopper variant could not be built for such operands before."""
        unbuilt = self._unbuilt
        return bool(unbuilt) and (operands.launch_config, operands.head_dim) in unbuilt

    @functools.cached_property
    def first_choice(self) -> Any:
        """The Hopper variant alone, which raises where it cannot be built."""
        home = importlib.import_module("sage_plugin.kernels.attention.backends.hopper.launch")
        return home.QuantizedHopper(self.recipe)


@functools.lru_cache(maxsize=256)
def _portable_config(kernel: str, given: LaunchConfig, head_dim: int) -> LaunchConfig:
    """A config of the portable variant with the blocks of keys of one of the Hopper variant."""
    default = default_config(kernel, HOPPER_ARCH, head_dim)
    assert default is not None
    return default.replaced(
        block_n=given.block_n, smooth_k=given.smooth_k, smooth_v=given.smooth_v,
        hadamard=given.hadamard, q_granule=given.q_granule,
    )  # fmt: skip


def _takes(problem: AttentionParams) -> bool:
    """Whether the Hopper variant takes a call."""
    plain = problem.window == NO_WINDOW and problem.packed is None and problem.sinks is None
    return plain and not problem.softcap and (problem.mask is None or by_key(problem.mask))
