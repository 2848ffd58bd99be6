"""Q and K whose norms and rotary embedding are still to be done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from sage_plugin.kernels.attention.prologue.record import QkStream, Rope

Sizes4 = tuple[int, int, int, int]

ALIGNMENT = 16
"""Bytes; a build may follow from how far an address is aligned to them."""


@dataclass(frozen=True, slots=True, eq=False)
class QkPair:
    """The streams of Q and of K, one after another each; K's may be left out.

    Attributes:
        q: those of Q.
        k: those of K.
    """

    q: tuple[QkStream, ...]
    k: tuple[QkStream, ...]
    _inputs: tuple[torch.Tensor, ...] = field(init=False, default=(), repr=False)
    _form: tuple[object, ...] = field(init=False, default=(), repr=False)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """All tensors that launches read, each once: tables or a norm may be of Q and K alike."""
        self.form()
        return self._inputs

    def form(self) -> tuple[object, ...]:
        """All of it but numbers and addresses, of which the alignment: one form runs one build."""
        if not self._form:
            streams = (*self.q, *self.k)
            first: dict[tuple[int, int], int] = {}
            found: list[torch.Tensor] = []
            places = []
            for x in (x for stream in streams for x in stream.tensors()):
                place = first.setdefault((x.data_ptr(), x.nbytes), len(found))
                if place == len(found):
                    found.append(x)
                places.append(place)
            residues = tuple(x.data_ptr() % ALIGNMENT for x in found)
            form = (len(self.q), tuple(x.form() for x in streams), tuple(places), residues)
            object.__setattr__(self, "_inputs", tuple(found))
            object.__setattr__(self, "_form", form)
        return self._form

    def unmade(self, layout: str) -> tuple[Unmade, Unmade]:
        """Q and K as they will be in a layout, without values."""
        return _unmade(self.q, layout), _unmade(self.k, layout)


class Unmade(torch.Tensor):
    """Shape, strides, dtype and device of a tensor that nobody has made; it has no values."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, shape: Sizes4, strides: Sizes4, like: torch.Tensor) -> Unmade:
        """Make one of the dtype and on the device of another tensor."""
        made: Unmade = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=like.dtype, device=like.device
        )
        return made

    def __init__(self, shape: Sizes4, strides: Sizes4, like: torch.Tensor) -> None:
        pass

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,  # noqa: ANN401
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Answer what needs no values, and refuse all else."""
        if func not in (torch.ops.aten.transpose.int, torch.ops.aten.empty_like.default):
            raise RuntimeError(f"{func} reads Q or K before norm and rotary embedding made it")
        x, *rest = args
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        made = func(like, *rest, **(kwargs or {}))
        moved = func is torch.ops.aten.transpose.int
        return cls(tuple(made.shape), made.stride(), x) if moved else made


def _unmade(streams: tuple[QkStream, ...], layout: str) -> Unmade:
    source = streams[0].source
    batch, _, heads, head_dim = source.shape
    tokens = sum(stream.source.shape[1] for stream in streams)
    rows = heads * head_dim
    if layout == "bhsd":
        shape = (batch, heads, tokens, head_dim)
        return Unmade(shape, (tokens * rows, head_dim, rows, 1), source)
    shape = (batch, tokens, heads, head_dim)
    return Unmade(shape, (tokens * rows, rows, head_dim, 1), source)


def same_rope(one: Rope | None, other: Rope | None) -> bool:
    """Whether two embeddings read the same tables in the same way."""
    if one is other:
        return True
    if one is None or other is None:
        return False
    pairs = ((one.cos, other.cos), (one.sin, other.sin))
    return (one.interleaved, one.skip) == (other.interleaved, other.skip) and all(
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
        for a, b in pairs
    )
