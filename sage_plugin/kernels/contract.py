"""What a kernel offers: a two-step implementation, and the decision that leads to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.schema import LaunchConfig

HOST = "host"
"""Variant of the kernels that belong to torch itself (`torch`, `sdpa`)."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Which kernel a call runs on.

    Attributes:
        kernel: kernel name; `"sdpa"` where the call goes to the host's attention.
        variant: variant name, `"host"` for torch's own.
        reason: why the call goes to the host's attention, `None` where it does not.
    """

    kernel: str
    variant: str
    reason: FallbackReason | None = None

    @property
    def label(self) -> str:
        """`kernel:variant`, as shown in reports."""
        return f"{self.kernel}:{self.variant}"


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A launch config and where it came from.

    Attributes:
        config: the launch config, of its op family's record.
        source: `"env"`, `"exact"`, `"near"` or `"default"`.
        detail: one sentence that names the file or the table.
        saved_ms: milliseconds that a call of this shape saves over the host's attention, by the
            times of its tuning; `None` where that was not measured.
        stale: in what the software differs from that of its tuning (`registry.staleness`).
    """

    config: Any
    source: str
    detail: str
    saved_ms: float | None = None
    stale: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        """The source as reports count it, with what is out of date marked."""
        return f"{self.source}, stale" if self.stale else self.source


UNBOUNDED = -1
"""A side of a window that has no limit."""

NO_WINDOW = (UNBOUNDED, UNBOUNDED)

HIDES = -1e38
"""Float mask values under it hide their key as -inf does; their log2 form would overflow."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Sequences of different lengths, one after another in one tensor.

    Attributes:
        cu_seqlens_q: int32 `(N + 1,)` on the tensors' device, the first row of each sequence and
            the end of the last.
        cu_seqlens_k: likewise, of K and V.
        max_seqlen_q: no sequence of Q is longer.
        max_seqlen_k: no sequence of K is longer.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """An attention call but for Q, K and V.

    Attributes:
        scale: factor of the scores before softmax, from the true head dim unless given.
        causal: bottom-right aligned causal mask.
        layout: `"bhsd"` or `"bshd"`, of the inputs and of the output; packed calls are `"bshd"`
            with one batch item.
        mask: `(B or 1, Hq or 1, Sq or 1, Sk)`, bool (True is visible) or float (natural-log units,
            added to the scores); never expanded, see `attention.mask`.
        window: keys that a row sees to the left and to the right of its own position (bottom-right
            aligned), `UNBOUNDED` for no limit.
        softcap: scores become `softcap * tanh(score / softcap)` before any mask; 0 for none.
        sinks: `(Hq,)` float, one more logit a head (natural-log units) that takes weight and has no
            value; it is part of the LSE.
        packed: sequences in Q, K and V, where there are several in one.
        lse: whether the LSE may be asked for; what only that takes is not prepared otherwise.
    """

    scale: float
    causal: bool
    layout: str
    mask: torch.Tensor | None = None
    window: tuple[int, int] = NO_WINDOW
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    packed: Packed | None = None
    lse: bool = True

    @property
    def left(self) -> int:
        """Keys before its own position that a row sees, `UNBOUNDED` for all."""
        return self.window[0]

    @property
    def right(self) -> int:
        """Keys after its own position that a row sees, `UNBOUNDED` for all; 0 if causal."""
        return 0 if self.causal else self.window[1]


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What the output has of Q, kept without Q so that a caller may free it after `prepare`.

    Attributes:
        shape: shape of Q in its own layout.
        strides: strides of the output, Q's memory order without its gaps.
        device: device of Q.
        layout: layout of Q.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: torch.device
    layout: str

    @classmethod
    def of(cls, q: torch.Tensor, layout: str) -> OutputForm:
        """The form of the output of a call with these queries."""
        like = torch.empty_like(q, device="meta")
        return cls(tuple(q.shape), like.stride(), q.device, layout)

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised output."""
        return torch.empty_strided(self.shape, self.strides, dtype=dtype, device=self.device)

    def empty_lse(self) -> torch.Tensor:
        """An uninitialised contiguous fp32 `(B, H, Sq)` log-sum-exp."""
        shape = lse_shape(self.shape, self.layout)
        return torch.empty(shape, dtype=torch.float32, device=self.device)


class Operands(Protocol):
    """What `prepare` made of Q, K and V; opaque to callers, and tied to one launch config."""

    @property
    def launch_config(self) -> LaunchConfig | None:
        """The launch config that fixed the quantisation blocks; `None` where nothing is tuned."""


Prepared = TypeVar("Prepared", bound=Operands)
"""The operands of one implementation, which only that implementation can launch."""


class Implementation(Protocol[Prepared]):
    """One variant of one kernel, in two steps so that each can be timed."""

    def prepare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        problem: AttentionParams,
        launch: LaunchConfig | None,
    ) -> Prepared:
        """Quantise: everything that depends on the data but is not attention."""

    def launch(
        self,
        operands: Prepared,
        *,
        out_dtype: torch.dtype | None = None,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attention on prepared operands; the output has V's dtype unless `out_dtype` is given."""


@dataclass(frozen=True, slots=True)
class PlainOperands:
    """Q, K and V as they came, for implementations that do not quantise."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    problem: AttentionParams
    launch_config: LaunchConfig | None

    @property
    def config(self) -> LaunchConfig:
        """The launch config of a kernel that has one."""
        assert self.launch_config is not None
        return self.launch_config


class ReadsInPlace:
    """The first step of implementations that do not quantise."""

    tuned: ClassVar[bool] = True
    """Whether the second step has a launch config."""

    def prepare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        problem: AttentionParams,
        launch: LaunchConfig | None,
    ) -> PlainOperands:
        """Keep the inputs; they are read through their strides."""
        return PlainOperands(q, k, v, problem, launch if self.tuned else None)


def bhsd(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A `(B, H, S, D)` view of a tensor in either layout."""
    return tensor if layout == "bhsd" else tensor.transpose(1, 2)


def lse_shape(shape: Sequence[int], layout: str) -> tuple[int, int, int]:
    """`(B, H, Sq)` of queries of a shape in a layout."""
    batch, heads, seq = shape[:3] if layout == "bhsd" else (shape[0], shape[2], shape[1])
    return batch, heads, seq
