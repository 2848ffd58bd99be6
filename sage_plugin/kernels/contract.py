"""What a kernel offers: a two-step implementation, and the decision that leads to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import torch

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
    reason: str | None = None

    @property
    def label(self) -> str:
        """`kernel:variant`, as shown in reports."""
        return f"{self.kernel}:{self.variant}"


@dataclass(frozen=True, slots=True)
class Found:
    """A launch config and where it came from.

    Attributes:
        config: the launch config.
        source: `"env"`, `"exact"`, `"near"` or `"default"`.
        detail: one sentence that names the file or the table.
    """

    config: LaunchConfig
    source: str
    detail: str


@dataclass(frozen=True, slots=True)
class Problem:
    """The part of an attention call that is not a tensor.

    Attributes:
        scale: factor of the scores before softmax, from the true head dim unless given.
        causal: bottom-right aligned causal mask.
        layout: `"bhsd"` or `"bshd"`, of the inputs and of the output.
    """

    scale: float
    causal: bool
    layout: str


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
        problem: Problem,
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
    problem: Problem
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
        problem: Problem,
        launch: LaunchConfig | None,
    ) -> PlainOperands:
        """Keep the inputs; they are read through their strides."""
        return PlainOperands(q, k, v, problem, launch if self.tuned else None)


def bhsd(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A `(B, H, S, D)` view of a tensor in either layout."""
    return tensor if layout == "bhsd" else tensor.transpose(1, 2)


def empty_output(q: torch.Tensor, dtype: torch.dtype, dv: int | None = None) -> torch.Tensor:
    """An output in Q's memory order where it has Q's shape; the op's fake uses it too."""
    if dv is None or dv == q.shape[3]:
        return torch.empty_like(q, dtype=dtype)
    return q.new_empty((*q.shape[:3], dv), dtype=dtype)


def empty_lse(q: torch.Tensor, layout: str) -> torch.Tensor:
    """A contiguous fp32 `(B, H, Sq)` buffer for the log-sum-exp."""
    batch, heads, seq = (q.shape[0], q.shape[1], q.shape[2])
    if layout == "bshd":
        heads, seq = seq, heads
    return torch.empty((batch, heads, seq), dtype=torch.float32, device=q.device)
