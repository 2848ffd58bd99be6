"""Where a report is tried again: in Triton's interpreter on small inputs, and on a GPU.

Both run the portable kernels; the reference is the definition of attention in fp64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

import pytest
import torch

import sage_plugin
from tests.kernels.calls import LIMITS, Shape, draw, launch, relative_l1

T = TypeVar("T")

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


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
        names = {"is_causal": "causal"}
        parts = {names.get(n, n): options[n] for n in PARTS if n in options}
        expected, expected_lse = exact(q, k, v, mask, **parts)
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
BF16_P = 6e-3
"""Error of `fav2` where it rounds its weights to bf16."""


def allowed(kernel: str, times: float = 1.0, dtype: torch.dtype = torch.float16) -> float:
    """Largest relative L1 error of a kernel."""
    limit = LIMITS[kernel]
    if kernel == "fav2" and dtype == torch.bfloat16:
        limit = BF16_P
    return limit * max(1.0, times)


def assert_close(kernel, out, expected, *, times=1.0, dtype=torch.float16) -> None:
    """An output is finite and near the exact one."""
    assert out.isfinite().all()
    error = relative_l1(out, expected)
    assert error <= allowed(kernel, times, dtype), f"{kernel}: {error:.5f}"


def exact(q, k, v, mask=None, *, causal=False, window=None, softcap=0.0, sinks=None, scale=None):
    """Output and LSE of bhsd tensors in fp64, with all scores at once."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = in_reach(q.shape[2], k.shape[2], causal, window or (-1, -1)).to(q.device)
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        seen = seen & (mask.double() >= -1e38)
        scores = scores + mask.double().clamp_min(-1e300)
    scores = scores.masked_fill(~seen, -math.inf)
    top = scores.amax(3, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks.double()[None, :, None, None])
    top = top.where(top > -math.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(3, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.double()[None, :, None, None] - top)
    out = weights @ v / total.where(total > 0, 1.0)
    return out, (total.log() + top).squeeze(3)


def in_reach(seq_q: int, seq_k: int, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    """`(Sq, Sk)` bool of the keys that position leaves to each row, aligned at the last key."""
    row = torch.arange(seq_q)[:, None] + seq_k - seq_q
    key = torch.arange(seq_k)[None, :]
    seen = torch.ones(seq_q, seq_k, dtype=torch.bool)
    left, right = window
    if causal:
        seen &= key <= row
    if right >= 0:
        seen &= key <= row + right
    if left >= 0:
        seen &= key >= row - left
    return seen
