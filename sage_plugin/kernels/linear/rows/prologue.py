"""What may come before the quantization of rows, in the same pass: activations and norms."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sage_plugin.errors import UnsupportedInputError

NORMS = ("layer_norm", "rms_norm")
PROLOGUES = ("none", "gelu", "gelu_tanh", "swiglu", *NORMS)


@dataclass(frozen=True, slots=True, eq=False)
class Prologue:
    """How the rows that are quantized come from the input.

    Attributes:
        kind: `"none"`; `"gelu"` by the error function or `"gelu_tanh"` by its approximation;
            `"swiglu"`, x times silu(gate); `"layer_norm"` or `"rms_norm"` over the channels.
        gate: of the same shape as x (`"swiglu"`).
        weight: `(K,)` of a norm, `None` for none; bias likewise (`"layer_norm"`).
        bias: see `weight`.
        eps: of a norm.
        factor: what a norm is modulated by: `norm * factor + shift`, broadcastable to x; models
            have `1 + scale` for it.
        shift: see `factor`.
    """

    kind: str = "none"
    gate: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    eps: float = 1e-6
    factor: torch.Tensor | None = None
    shift: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return gate, weight, bias, factor and shift."""
        return (self.gate, self.weight, self.bias, self.factor, self.shift)

    def check(self, x: torch.Tensor) -> None:
        """Raise unless the prologue fits an input.

        Raises:
            UnsupportedInputError: naming what does not fit.
        """
        if self.kind not in PROLOGUES:
            raise UnsupportedInputError(
                f"prologue {self.kind!r} is not known; choose one of {', '.join(PROLOGUES)}"
            )
        of_norm = self.tensors()[1:]
        if (self.gate is None) == (self.kind == "swiglu") or (
            self.kind not in NORMS and any(one is not None for one in of_norm)
        ):
            raise UnsupportedInputError(
                f"prologue {self.kind!r}: gate belongs to 'swiglu', the others to a norm"
            )
        shapes = (x.shape, x.shape[-1:], x.shape[-1:])
        for name, tensor, shape in zip(
            ("gate", "weight", "bias"), self.tensors(), shapes, strict=False
        ):
            if tensor is not None and tensor.shape != shape:
                raise UnsupportedInputError(
                    f"{name} is {tuple(tensor.shape)}; it needs to be {tuple(shape)}"
                )
        for name, tensor in (("factor", self.factor), ("shift", self.shift)):
            if tensor is not None and not _broadcasts(tensor.shape, x.shape):
                raise UnsupportedInputError(
                    f"{name} {tuple(tensor.shape)} does not broadcast to x {tuple(x.shape)}"
                )


NO_PROLOGUE = Prologue()


def check_prologue(prologue: object, x: torch.Tensor) -> None:
    """Raise unless something is a prologue that fits an input.

    Raises:
        UnsupportedInputError: naming what does not fit.
    """
    if not isinstance(prologue, Prologue):
        raise UnsupportedInputError(
            f"prologue is {prologue!r}; give a sage_plugin.Prologue, such as Prologue('gelu')"
        )
    prologue.check(x)


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(
        one in (1, other) for one, other in zip(reversed(shape), reversed(to), strict=False)
    )


def prologued(x: torch.Tensor, prologue: Prologue) -> torch.Tensor:
    """Return the rows that are quantized, in fp32; plain torch, traceable.

    Sources: GELU (arXiv 1606.08415), SwiGLU (2002.05202), RMSNorm (1910.07467), modulation as in
    DiT (2212.09748) section 3.2.

    Args:
        x: `(..., K)`.
        prologue: what is done.
    """
    y = x.float()
    kind = prologue.kind
    if kind == "swiglu":
        assert prologue.gate is not None
        return y * torch.nn.functional.silu(prologue.gate.float())
    if kind in ("gelu", "gelu_tanh"):
        approximate = "tanh" if kind == "gelu_tanh" else "none"
        return torch.nn.functional.gelu(y, approximate=approximate)
    if kind == "layer_norm":
        y = y - y.mean(-1, keepdim=True)
    if kind in NORMS:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + prologue.eps)
    if prologue.weight is not None:
        y = y * prologue.weight.float()
    if prologue.bias is not None:
        y = y + prologue.bias.float()
    if prologue.factor is not None:
        y = y * prologue.factor.float()
    return y if prologue.shift is None else y + prologue.shift.float()
