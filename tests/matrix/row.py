"""What a row of the matrix is: a call, its mistaken readings, and the same call in other words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.kernels.calls import EMULATED, Shape
from tests.matrix.definition import definition
from tests.matrix.masks import MaskOf

SMALL = Shape(2, 2, 1, 33, 70, 32)
LARGE = Shape(2, 4, 2, 300, 421, 64)
NO_PART = {"mask": None, "is_causal": False, "window": None, "softcap": 0.0, "scale": None}


@dataclass(frozen=True)
class Case:
    """A call: bhsd tensors, a mask, and options of `attention` that its definition has too."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> Case:
        """Return the case with other tensors, another mask or other options."""
        own = {n: x for n, x in changes.items() if n in ("q", "k", "v", "mask")}
        more = {n: x for n, x in changes.items() if n not in own}
        return dataclasses.replace(self, **own, options=self.options | more)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Case:
        """Return the case with each of Q, K and V changed."""
        return self.but(q=change(self.q), k=change(self.k), v=change(self.v))

    def definition(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return output and LSE as they should be, in fp64."""
        return definition(self.q, self.k, self.v, self.mask, **self.options)


Change = Callable[[Case], Case]
Others = Callable[[Case], Iterable[Case]]


@dataclass(frozen=True)
class Row:
    """A feature.

    Attributes:
        name: what is asked, in a few words.
        reports: numbers of docs/failure_reports.md.
        small: shape in the interpreter and of the emulations.
        large: shape on a GPU; `None` for the small one.
        mask: makes the mask.
        options: of the call; `sinks` is made from the shape.
        dtype: of Q, K and V, or one for each.
        change: makes the call from drawn tensors.
        wrong: mistaken readings, which are far from the answer.
        same: the same call in other words, with the same answer to the bit.
        launch: fields of the launch config.
        times: how much more error than on plain drawn inputs is allowed.
        kernels: which kernels it is asked of.
        truncated: what FP8 sums of tensor cores, which truncate as they add, may add to the error.
        everywhere: whether the interpreter runs all of them, and not two.
    """

    name: str
    reports: tuple[int, ...] = ()
    small: Shape = SMALL
    large: Shape | None = LARGE
    mask: MaskOf | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | tuple[torch.dtype, ...] = torch.float16
    change: Change = lambda case: case
    wrong: Others = lambda case: ()
    same: Others = lambda case: ()
    launch: dict[str, Any] = field(default_factory=dict)
    times: float = 3.0
    kernels: tuple[str, ...] = EMULATED
    truncated: float = 2e-4
    everywhere: bool = False

    def __str__(self) -> str:
        numbers = "_".join(map(str, self.reports))
        return f"report_{numbers} {self.name}" if self.reports else self.name


# -- changes ----------------------------------------------------------------------------------


def louder(case: Case) -> Case:
    """V has a trend and steps, so that an output shows which keys it is made of."""
    seq = case.v.shape[2]
    v = case.v + 2 * torch.linspace(-1, 1, seq, device=case.v.device)[:, None].to(case.v.dtype)
    v[:, :, ::2] += 2.0
    return case.but(v=v)


def sharper(case: Case) -> Case:
    """Larger scores, which a wrong scale changes more than rounding does."""
    return case.but(q=case.q * 3, k=case.k - case.k.mean(2, keepdim=True))


def with_value(name: str, at: Any, value: float) -> Change:
    """Return a change that writes a number into a copy of a tensor."""

    def change(case: Case) -> Case:
        x = getattr(case, name).clone()
        x[at] = value
        return case.but(**{name: x})

    return change


def alternating(value: float) -> Change:
    """Return a change to equal weights of values of one size, of which a third is opposed."""

    def change(case: Case) -> Case:
        sign = torch.where(torch.arange(case.v.shape[2]) % 3 == 0, -0.5, 1.0)[:, None]
        v = torch.full(case.v.shape, value) * sign
        return case.but(q=case.q * 0, v=v.to(case.v))

    return change


def scaled(**factors: float) -> Change:
    """Return a change that multiplies tensors, each by its own factor."""
    return lambda case: case.but(
        **{name: getattr(case, name) * factor for name, factor in factors.items()}
    )


def signs(name: str, size: float) -> Change:
    """Return a change that leaves the signs of a tensor, and one absolute value."""
    return lambda case: case.but(**{name: getattr(case, name).sign() * size})


def beside_nan(case: Case) -> Case:
    """K and V at the start of longer buffers, with NaN behind them."""
    pad = torch.nn.functional.pad
    return case.but(
        k=pad(case.k, (0, 0, 0, 300), value=torch.nan)[:, :, : case.k.shape[2]],
        v=pad(case.v, (0, 0, 0, 300), value=torch.nan)[:, :, : case.v.shape[2]],
    )


def means_of_heads(case: Case) -> Case:
    """A mean of K and a mean and a scale of V that are each head's own."""
    head = torch.arange(case.k.shape[1], device=case.k.device).view(-1, 1, 1).to(case.k.dtype)
    return case.but(k=case.k + 8 * head, v=case.v * (1 + head) - head)


def loud_thirds(factor: float) -> Change:
    """Return a change that makes every third key large, and all scores small or large."""

    def change(case: Case) -> Case:
        k = case.k.clone()
        k[:, :, ::3] *= 40
        return case.but(q=case.q * factor, k=k * factor)

    return change


def with_outliers(channels: int, mean: float, spread: float, in_q: float = 1.0) -> Change:
    """Return a change to K whose few channels have a mean or a spread of their own."""

    def change(case: Case) -> Case:
        at = torch.arange(channels) * (case.k.shape[3] // channels)
        q, k = case.q.clone(), case.k - case.k.mean(2, keepdim=True)
        k[..., at] *= spread
        k[..., at] += mean * torch.linspace(-1, 1, channels).to(k)
        q[..., at] *= in_q
        return case.but(q=q, k=k)

    return change


# -- mistaken readings, and other words ---------------------------------------------------------


def without(*names: str) -> Others:
    """Return the calls in which one of these parts is ignored."""
    return lambda case: [case.but(**{name: NO_PART[name]}) for name in names]


def padded_scale(case: Case) -> list[Case]:
    """The scale of the head dim that kernels round up to."""
    dim = case.q.shape[3]
    padded = 1 << (dim - 1).bit_length()
    return [case.but(scale=padded**-0.5)] if padded > 1.25 * dim else []


def top_left(case: Case) -> list[Case]:
    """A causal mask that is aligned at the first key."""
    size = (case.q.shape[2], case.k.shape[2])
    mask = torch.ones(size, dtype=torch.bool, device=case.q.device).tril()
    return [case.but(mask=mask, is_causal=False)]


def other_units(case: Case) -> list[Case]:
    """A bias in log2 units, one that is converted twice, and none."""
    return [case.but(mask=case.mask * factor) for factor in (0.6931, 1 / 0.6931, 0.0)]


def without_bias(case: Case) -> list[Case]:
    """A bias of which only what it hides is heeded."""
    return [case.but(mask=case.mask >= -1e38)]


def contiguous(case: Case) -> list[Case]:
    """Tensors in the usual memory order."""
    return [case.each(torch.Tensor.contiguous)]


def narrowed(case: Case) -> list[Case]:
    """A mask without the dimensions along which it is expanded."""
    mask = case.mask
    for dim, stride in enumerate(mask.stride()):
        mask = mask.narrow(dim, 0, 1) if stride == 0 else mask
    return [case.but(mask=mask.contiguous())]


def mask_orders(case: Case) -> list[Case]:
    """A mask for each head of each item, in other memory orders too."""
    size = (*case.q.shape[:3], case.k.shape[2])
    full = case.mask.expand(size)
    turned = full.transpose(2, 3).contiguous().transpose(2, 3)
    padded = torch.zeros(*size[:3], size[3] + 1, dtype=full.dtype, device=full.device)
    padded[..., 1:] = full
    return [case.but(mask=mask) for mask in (full.contiguous(), turned, padded[..., 1:])]


def beyond_the_diagonal(case: Case) -> list[Case]:
    """A mask with other numbers where causality hides all keys."""
    rows, keys = case.mask.shape[-2:]
    above = torch.ones_like(case.mask, dtype=torch.bool).triu(1 + keys - rows)
    return [case.but(mask=case.mask.masked_fill(above, x)) for x in (torch.nan, torch.inf)]


def heads_repeated(case: Case) -> list[Case]:
    """A head of K and V for each of Q."""
    group = case.q.shape[1] // case.k.shape[1]
    return [case.but(**{n: getattr(case, n).repeat_interleave(group, 1) for n in "kv"})]


def padding_filled(case: Case) -> list[Case]:
    """Anything in the keys that `masks.padding` hides."""
    made = []
    for value in (torch.nan, torch.inf, 6e4):
        k, v = case.k.clone(), case.v.clone()
        k[0, :, -9:], v[0, :, -9:] = value, -value
        made.append(case.but(k=k, v=v))
    return made
