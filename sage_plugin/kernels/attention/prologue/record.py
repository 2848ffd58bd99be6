"""What is done to Q and K before attention: the records that callers give, and their checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sage_plugin.errors import UnsupportedInputError

KINDS = ("layer", "rms")


@dataclass(frozen=True, slots=True, eq=False)
class QkNorm:
    """A norm of Q or K over the channels of each head, or over those of all heads.

    It is computed in fp32 and rounded to the dtype of its input.

    Attributes:
        kind: `"layer"` (less the mean, over the standard deviation) or `"rms"`.
        weight: one factor a channel, `(D,)` or with `across_heads` `(H*D,)`; `None` for 1.
        bias: what is added, likewise; `None` for 0.
        eps: what is added to the variance, or to the mean square.
        across_heads: one mean for all heads of a token, as Wan and LTX have it.
        rounds_first: round before the weight, and again before the bias, as the `RMSNorm` of
            diffusers does with 16-bit weights.

    Example:
        >>> QkNorm("rms", eps=1e-6).across_heads
        False
    """

    kind: str
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    eps: float = 1e-5
    across_heads: bool = False
    rounds_first: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnsupportedInputError(
                f"a norm of kind {self.kind!r} is not known; choose 'layer' or 'rms'"
            )

    def check(self, heads: int, head_dim: int, name: str) -> None:
        """Refuse a weight or bias that does not fit a tensor."""
        width = heads * head_dim if self.across_heads else head_dim
        for part, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is not None and tuple(tensor.shape) != (width,):
                raise UnsupportedInputError(
                    f"the {part} of {name} is {tuple(tensor.shape)}; with {heads} heads of "
                    f"{head_dim} channels and across_heads={self.across_heads} it needs ({width},)"
                )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that it holds."""
        return tuple(x for x in (self.weight, self.bias) if x is not None)


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Rotary position embedding: pairs of channels turned by the angle of their token.

    A pair `(a, b)` becomes `(a cos - b sin, b cos + a sin)`, in fp32. Tables have a row for each
    turned token, `(S, W)`, `(B, S, W)` or `(B, S, H, W)` with 1 for a size that does not matter. W
    is half the head dim, or all of it: then each channel has its own cosine and sine.

    Attributes:
        cos: cosines.
        sin: sines, of the same shape.
        interleaved: pairs are neighbors, as in Flux, CogVideoX and Wan; else channel i and
            channel i + D/2 are one ("rotate half").
        skip: tokens before the first that is turned, such as a text in front of a video. Tokens
            after the last row of the tables are not turned either.

    Example:
        >>> Rope(torch.ones(16, 32), torch.zeros(16, 32), skip=4).rows
        16
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = True
    skip: int = 0

    @staticmethod
    def of(given: Rope | tuple[torch.Tensor, torch.Tensor] | torch.Tensor) -> Rope:
        """Tables as a record: cosines and sines, or complex numbers of neighbors as in Wan."""
        if isinstance(given, Rope):
            return given
        if isinstance(given, torch.Tensor) and given.is_complex():
            parts = torch.view_as_real(given)
            return Rope(parts[..., 0], parts[..., 1])
        if isinstance(given, tuple | list) and len(given) == 2:
            return Rope(*given)
        raise UnsupportedInputError(
            f"rope is {type(given).__name__}; it needs (cos, sin), a complex tensor, or a Rope"
        )

    @property
    def rows(self) -> int:
        """Tokens that are turned."""
        return self.cos.shape[0 if self.cos.dim() == 2 else 1]

    def extent(self) -> tuple[int, int, int, int]:
        """Batch, rows, heads and width of the tables, 1 for a size that does not matter."""
        shape = self.cos.shape
        if len(shape) == 2:
            return 1, shape[0], 1, shape[1]
        return shape[0], shape[1], shape[2] if len(shape) == 4 else 1, shape[-1]

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines as `(B or 1, S, H or 1, W)`, views of the given ones."""
        return _with_heads(self.cos), _with_heads(self.sin)

    def check(self, shape: tuple[int, int, int, int], name: str) -> None:
        """Refuse tables that do not fit a tensor of batch, tokens, heads and channels."""
        batch, tokens, heads, head_dim = shape
        of_cos, of_sin = tuple(self.cos.shape), tuple(self.sin.shape)
        if of_cos != of_sin or not 2 <= len(of_cos) <= 4:
            raise UnsupportedInputError(
                f"cos {of_cos} and sin {of_sin} need one shape of 2 to 4 dimensions"
            )
        b, rows, h, width = self.extent()
        fits = (
            b in (1, batch)
            and h in (1, heads)
            and head_dim % 2 == 0
            and width in (head_dim, head_dim // 2)
            and 0 <= self.skip <= self.skip + rows <= tokens
        )
        if not fits:
            raise UnsupportedInputError(
                f"tables {of_cos} behind {self.skip} tokens do not fit {name} of {batch} x "
                f"{tokens} tokens, {heads} heads and {head_dim} channels: they need at most as "
                "many rows as tokens are left, and all channels of an even head dim or half of them"
            )


def _with_heads(table: torch.Tensor) -> torch.Tensor:
    if table.dim() == 2:
        return table[None, :, None]
    return table[:, :, None] if table.dim() == 3 else table


@dataclass(frozen=True, slots=True, eq=False)
class QkStream:
    """Tokens of Q or K that have one norm, such as those of the text or of the image.

    Attributes:
        source: `(B, S, H, D)` with any strides, as the projection left it.
        norm: its norm, if any.
        rope: its rotary embedding, if any, of tokens of this stream.
    """

    source: torch.Tensor
    norm: QkNorm | None = None
    rope: Rope | None = None

    def check(self, name: str) -> None:
        """Refuse a norm or tables that do not fit the tokens."""
        batch, tokens, heads, head_dim = self.source.shape
        if self.norm is not None and not isinstance(self.norm, QkNorm):
            raise UnsupportedInputError(
                f"{name}_norm is {type(self.norm).__name__}; give a sage_plugin.QkNorm, such as "
                "QkNorm('rms', weight, eps=1e-6)"
            )
        self._check_tensors(name)
        if self.norm is not None:
            self.norm.check(heads, head_dim, f"{name}_norm")
        if self.rope is not None:
            self.rope.check((batch, tokens, heads, head_dim), name)

    def _check_tensors(self, name: str) -> None:
        """Refuse what is no tensor of floats beside the tokens."""
        norm, rope = self.norm, self.rope
        parts = () if norm is None else (("weight", norm.weight), ("bias", norm.bias))
        named = {f"the {part} of {name}_norm": one for part, one in parts if one is not None}
        named |= {} if rope is None else {"cos": rope.cos, "sin": rope.sin}
        for what, one in named.items():
            if not isinstance(one, torch.Tensor) or not one.is_floating_point():
                kind = one.dtype if isinstance(one, torch.Tensor) else type(one).__name__
                raise UnsupportedInputError(f"{what} is {kind}; it needs a tensor of floats")
            if one.device != self.source.device:
                raise UnsupportedInputError(
                    f"{what} is on {one.device} and {name} on {self.source.device}; move them to "
                    "one device"
                )

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors that take part."""
        yield self.source
        if self.norm is not None:
            yield from self.norm.tensors()
        if self.rope is not None:
            yield from (self.rope.cos, self.rope.sin)

    def form(self) -> tuple[object, ...]:
        """All of it but numbers and addresses: calls of one form run the same code."""
        norm, rope = self.norm, self.rope
        of_norm = norm and (
            norm.kind, norm.eps, norm.across_heads, norm.rounds_first,
            _of_values(norm.weight), _of_values(norm.bias),
        )  # fmt: skip
        of_rope = rope and (rope.interleaved, rope.skip, _of_values(rope.cos), _of_values(rope.sin))
        return _of_values(self.source), of_norm, of_rope

    def without_copies(self) -> QkStream:
        """The same with the channels of its source one after another, where they are not."""
        if self.source.stride(-1) == 1:
            return self
        return dataclasses.replace(self, source=self.source.contiguous())


def _of_values(x: torch.Tensor | None) -> tuple[object, ...] | None:
    return None if x is None else (x.shape, x.stride(), x.dtype)
