"""Q and K through their norms and rotary embedding: by the kernel where it runs, else by torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from sage_plugin import device
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention.prologue import emulation
from sage_plugin.kernels.attention.prologue.pair import QkPair
from sage_plugin.kernels.attention.prologue.record import QkNorm, QkStream, Rope
from sage_plugin.kernels.support import prologue_reason
from sage_plugin.kernels.surroundings import are_plain, on_device, wants_gradient
from sage_plugin.schema import LAYOUTS

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def streams_of(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    layout: str,
    rope: Rope | tuple[torch.Tensor, torch.Tensor] | torch.Tensor | None = None,
    q_norm: QkNorm | None = None,
    k_norm: QkNorm | None = None,
) -> QkPair:
    """Return what is to be done with Q and K as their projections gave them.

    Args:
        q: `(B, Hq, Sq, D)` in layout `"bhsd"`, `(B, Sq, Hq, D)` in `"bshd"`.
        k: likewise.
        layout: layout of both.
        rope: rotary embedding of both.
        q_norm: norm of Q, before its embedding.
        k_norm: norm of K.

    Raises:
        UnsupportedInputError: shapes do not fit together, or the layout is not known.
    """
    if layout not in LAYOUTS:
        raise UnsupportedInputError(f"layout {layout!r} is not known; choose 'bhsd' or 'bshd'")
    if q.dim() != 4 or k.dim() != 4:
        raise UnsupportedInputError(
            f"q and k have {q.dim()} and {k.dim()} dimensions; each needs 4 ({layout})"
        )
    table = None if rope is None else Rope.of(rope)
    tokens_first = (lambda x: x.transpose(1, 2)) if layout == "bhsd" else (lambda x: x)
    of_q = QkStream(tokens_first(q), q_norm, table)
    of_k = QkStream(tokens_first(k), k_norm, table)
    of_q.check("q")
    of_k.check("k")
    return QkPair((of_q,), (of_k,))


def joined_pair(q: Sequence[QkStream], k: Sequence[QkStream]) -> tuple[torch.Tensor, torch.Tensor]:
    """Q and K of joint streams, each `(B, sum of S, H, D)`; shapes fit."""
    if not runs_on_kernel([*q, *k]):
        return emulation.joined(q), emulation.joined(k)
    from sage_plugin.kernels.attention.prologue import launch  # which imports Triton

    with on_device(q[0].source.device):
        return launch.joined_pair(q, k)


def joined(streams: Sequence[QkStream]) -> torch.Tensor:
    """Q or K alone."""
    if not runs_on_kernel(streams):
        return emulation.joined(streams)
    from sage_plugin.kernels.attention.prologue import launch

    with on_device(streams[0].source.device):
        return launch.joined(streams)


def runs_on_kernel(streams: Sequence[QkStream]) -> bool:
    """Whether the Triton kernel computes streams; torch's operations do elsewhere.

    Gradients flow through those, and compilers fuse them.
    """
    if torch.compiler.is_compiling():
        return False
    tensors = [x for stream in streams for x in stream.tensors()]
    sources = [stream.source for stream in streams]
    place, dtype = sources[0].device, sources[0].dtype
    return (
        runs_on(place)
        and all(x.device == place for x in tensors)
        and dtype in KERNEL_DTYPES
        and all(x.dtype == dtype and x.shape[-1] % 2 == 0 for x in sources)
        and are_plain(*tensors)
        and not wants_gradient(*tensors)
    )


@functools.cache
def runs_on(place: torch.device) -> bool:
    """Whether a device runs the kernel; asking torch for it takes longer than a launch."""
    return place.type == "cuda" and prologue_reason(device.facts(place)) is None
