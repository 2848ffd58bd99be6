"""Where a report is tried again: in Triton's interpreter on small inputs, and on a GPU.

Both run the portable kernels; the reference is the definition of attention in fp64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import torch

import sage_plugin
from tests.kernels.calls import LIMITS, Shape, draw, launch, relative_l1
from tests.matrix.definition import definition
from tests.matrix.places import BF16_WEIGHTS

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """The device of a test; `str()` names it."""

    device: str

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    def pick(self, interpreted: T, on_gpu: T) -> T:
        """What the interpreter has time for, or what the report says."""
        return on_gpu if self.on_gpu else interpreted

    def draw(self, shape: Shape, dtype=torch.float16, *, layout="bhsd", seed=0):
        """Q, K with a bias of each channel, and V with a mean."""
        return tuple(x.to(self.device) for x in draw(shape, dtype, layout=layout, seed=seed))

    def normal(self, *size, dtype=torch.float32, seed=0):
        """Normal numbers, the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*size, generator=generator).to(self.device, dtype)

    def options(self, **options):
        """Arguments of a call on the portable kernels; small blocks in the interpreter."""
        options = {"variant": "portable", **options}
        if not self.on_gpu:
            options.setdefault("launch", launch(32, 32))
        return options

    def attention(self, kernel, q, k, v, mask=None, **options):
        return sage_plugin.attention(q, k, v, mask, kernel=kernel, **self.options(**options))

    def checked(self, kernel, q, k, v, mask=None, *, times=1.0, **options):
        """Output in fp32 and LSE of a bhsd call, held against the definition.

        Args:
            times: how much more error than on small drawn inputs is allowed.
        """
        parts = {name: options[name] for name in PARTS if name in options}
        expected, expected_lse = definition(q, k, v, mask, **parts)
        out, lse = self.attention(
            kernel, q, k, v, mask, return_lse=True, out_dtype=torch.float32, **options
        )
        assert_close(kernel, out, expected, times=times, dtype=v.dtype)
        alive = expected_lse.isfinite()
        assert torch.equal(lse.isfinite(), alive)
        assert (out[expected_lse == -math.inf] == 0).all()
        if alive.any():
            scores = 0.3 if kernel == "fav3_fp8" else 0.1  # 3 bits of mantissa
            assert (lse - expected_lse)[alive].abs().max() < scores * times
        return out, lse

    def nan_memory(self, like: int = 1 << 20) -> None:
        """Leave NaN where a GPU's allocator looks next, in blocks of every size up to a call's."""
        if self.on_gpu:
            sizes = [256 << i for i in range(0, 40, 2) if 256 << i <= 4 * like]
            held = [torch.full((n,), math.nan, device=self.device) for n in sizes for _ in range(3)]
            del held

    def __str__(self) -> str:
        return self.device


PARTS = ("is_causal", "window", "softcap", "sinks", "scale")


def allowed(kernel: str, times: float = 1.0, dtype: torch.dtype = torch.float16) -> float:
    """Largest relative L1 error of a kernel."""
    limit = LIMITS[kernel]
    if kernel == "fav2" and dtype == torch.bfloat16:
        limit = BF16_WEIGHTS
    return limit * max(1.0, times)


def assert_close(kernel, out, expected, *, times=1.0, dtype=torch.float16) -> None:
    """An output is finite and near the exact one."""
    assert out.isfinite().all()
    error = relative_l1(out, expected)
    assert error <= allowed(kernel, times, dtype), f"{kernel}: {error:.5f}"
