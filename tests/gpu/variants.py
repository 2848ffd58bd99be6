"""The variants that a device runs, and the launch configs of calls on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.attention.call import shape_of
from sage_plugin.kernels.attention.mask import mask_kind, normalized
from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.support import hopper_reason
from sage_plugin.schema import LaunchConfig
from tests.kernels.calls import EMULATED, HOPPER

PORTABLE = [(kernel, "portable") for kernel in EMULATED]
GLUON = [(kernel, "hopper") for kernel in HOPPER]
PAIRS = PORTABLE + GLUON


def each(pairs: list[tuple[str, str]] = PAIRS) -> Any:
    """Run a test for each of these kernels and variants."""
    cases = [pytest.param(*pair, id=":".join(pair)) for pair in pairs]
    return pytest.mark.parametrize(("kernel", "variant"), cases)


def skip_what_is_left(kernel: str, variant: str, dim: int, **call: Any) -> None:
    """Skip a call that a Hopper variant leaves to the portable one, or a device without it."""
    if variant == "hopper":
        reason = hopper_reason(kernel, dispatch.facts_of("cuda", 0), dim, **call)
        if reason is not None:
            pytest.skip(str(reason))


def config_of(
    kernel: str, variant: str, q: Any, k: Any, v: Any, *, causal: bool = False,
    mask: torch.Tensor | None = None, layout: str = "bhsd", **fields: Any,
) -> LaunchConfig:  # fmt: skip
    """The default launch config of a call on a variant, with some fields changed."""
    four = None
    if mask is not None:
        four = normalized(
            mask, batch=q.shape[0], heads_q=q.shape[1], seq_q=q.shape[2], seq_k=k.shape[2]
        )
    shape = shape_of(q, k, v, causal=causal, scale=1.0, layout=layout, mask_kind=mask_kind(four))
    key = dispatch.call_key(shape, Decision(kernel, variant))
    return dispatch.default_launch(key, dispatch.facts_of("cuda", 0)).replaced(**fields)


def poison(like: torch.Tensor) -> None:
    """Leave NaN where the allocator will look next, in blocks of every size up to a call's."""
    held = []
    for size in (256, 4096, 65536, like.numel(), 2 * like.numel()):
        held += [torch.full((size,), float("nan"), device="cuda") for _ in range(4)]
    del held
