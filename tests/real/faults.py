"""Kernels with one mistake each, to see how far their errors lie from those of right ones.

Each is the emulation with something changed between or inside its two steps. They are mistakes
that kernels really make: a wrong index, a forgotten term, sums that are kept too coarsely.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch

from sage_plugin.kernels.attention.backends.emulation import quantized
from sage_plugin.kernels.attention.backends.emulation.online_softmax import (
    FIRST_TOP,
    Block,
    RowSums,
    Weights,
    blockwise,
)
from sage_plugin.kernels.attention.backends.emulation.quantized import (
    EmulatedSequence,
    QuantizedEmulation,
)
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.kernels.quantize.recipe import Recipe
from sage_plugin.schema import LaunchConfig
from tests.real.captured import Captured
from tests.real.judged import problem_of

FP8_KERNELS = ("fav3_sage", "fav3_fp8")
ALL_KERNELS = ("sage", *FP8_KERNELS)
MMA_KEYS = 32
"""Keys of one FP8 tensor-core instruction."""
LOST_BITS = 10
"""Of fp32's 23 bits of mantissa, Hopper's FP8 accumulator keeps about 13."""


class FlatP(Recipe):
    """P stored as it is, in 0..1, where FP8 has few steps."""

    p_offset = 0.0  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake.

    Attributes:
        name: what is wrong.
        kernels: the kernels that can have it.
        operands: changes the quantised operands of a call.
        problem: changes the call, told its key length.
        sums: stands for the loop over key blocks.
        recipe: stands for the number formats.
        launch: changes the launch config.
    """

    name: str
    kernels: tuple[str, ...] = ALL_KERNELS
    operands: Callable[[EmulatedSequence], EmulatedSequence] = lambda part: part
    problem: Callable[[AttentionParams, int], AttentionParams] = lambda problem, seq_k: problem
    sums: Callable[..., RowSums] = blockwise
    recipe: type[Recipe] = Recipe
    launch: Callable[[LaunchConfig], LaunchConfig] = lambda launch: launch


def output(
    fault: Fault, one: Captured, kernel: str, launch: LaunchConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 output and LSE of a kernel with a mistake."""
    call = one.call
    right = implementation(kernel, "emulation")
    assert isinstance(right, QuantizedEmulation)
    wrong = QuantizedEmulation(fault.recipe(**_fields(right.recipe)))
    problem = fault.problem(problem_of(call), call.k.shape[2])
    operands = wrong.prepare(call.q, call.k, call.v, problem=problem, launch=fault.launch(launch))
    parts = tuple(fault.operands(part) for part in operands.sequences)
    with mock.patch.object(quantized, "blockwise", fault.sums):
        out, lse = wrong.launch(
            dataclasses.replace(operands, sequences=parts),
            out_dtype=torch.float32,
            return_lse=True,
        )
    assert lse is not None
    return out, lse


def _fields(recipe: Recipe) -> dict[str, object]:
    return {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}


def _rolled(part: str, field: str, dim: int) -> Callable[[EmulatedSequence], EmulatedSequence]:
    """Take each granule's entry of `field` from its neighbour."""

    def change(sequence: EmulatedSequence) -> EmulatedSequence:
        operand = getattr(sequence, part)
        moved = dataclasses.replace(operand, **{field: getattr(operand, field).roll(1, dim)})
        return dataclasses.replace(sequence, **{part: moved})

    return change


def _without(part: str, field: str) -> Callable[[EmulatedSequence], EmulatedSequence]:
    """Forget a term."""

    def change(sequence: EmulatedSequence) -> EmulatedSequence:
        operand = getattr(sequence, part)
        zero = torch.zeros_like(getattr(operand, field))
        return dataclasses.replace(
            sequence, **{part: dataclasses.replace(operand, **{field: zero})}
        )

    return change


def _sees_padding(sequence: EmulatedSequence) -> EmulatedSequence:
    """The last key block taken for a whole one; the diagonal moves with it."""
    blocks, block_n = sequence.keys.values.shape[2:4]
    poison = torch.nn.functional.pad(sequence.poison, (0, blocks * block_n - sequence.seq_k))
    return dataclasses.replace(sequence, seq_k=blocks * block_n, poison=poison)


def _one_key_off(problem: AttentionParams, seq_k: int) -> AttentionParams:
    """The mask moved by one key: the diagonal, the padding, or the end of the keys."""
    if problem.causal:
        return dataclasses.replace(problem, causal=False, window=(-1, 1))
    if problem.mask is not None:
        return dataclasses.replace(problem, mask=problem.mask.roll(1, -1))
    visible = (torch.arange(seq_k) < seq_k - 1).view(1, 1, 1, -1)
    return dataclasses.replace(problem, mask=visible)


def _last_block_left_out(scores: Block, values: Block, **options) -> RowSums:
    blocks = options.pop("blocks")
    return blockwise(scores, values, blocks=max(1, blocks - 1), **options)


def _summed(
    scores: Block,
    values: Block,
    *,
    blocks: int,
    weigh: Weights,
    p_offset: float,
    decays: bool = True,
    one_level: bool = False,
) -> RowSums:
    """`blockwise` with a mistake.

    Without `decays`, the sums of earlier blocks are not scaled down when the maximum grows. With
    `one_level`, all of P V stays in the tensor core's own accumulator, which keeps 13 bits.
    """
    acc = norm = top = torch.zeros(())
    for j in range(blocks):
        s, v = scores(j), values(j)
        if j == 0:
            acc, norm = s.new_zeros((*s.shape[:3], v.shape[-1])), s.new_zeros(s.shape[:3])
            top = torch.full_like(norm, FIRST_TOP)
        new_top = torch.maximum(top, s.amax(-1))
        decay = torch.exp2(top - new_top) if decays else torch.ones_like(top)
        p, summed = weigh(s - (new_top - p_offset)[..., None], j)
        norm, acc, top = norm * decay + summed.sum(-1), acc * decay[..., None], new_top
        step = MMA_KEYS if one_level else p.shape[-1]
        for first in range(0, p.shape[-1], step):
            part = slice(first, first + step)
            acc = acc + p[..., part] @ v[..., part, :]
            acc = _truncated(acc) if one_level else acc
    return RowSums(acc, norm, top, p_offset)


def _truncated(x: torch.Tensor) -> torch.Tensor:
    bits = x.contiguous().view(torch.int32)
    return (bits >> LOST_BITS << LOST_BITS).view(torch.float32)


def _heads(part: EmulatedSequence) -> EmulatedSequence:
    for name in ("keys", "values"):
        operand = getattr(part, name)
        moved = {f.name: getattr(operand, f.name).roll(1, 1) for f in dataclasses.fields(operand)}
        part = dataclasses.replace(part, **{name: dataclasses.replace(operand, **moved)})
    return part


def _shiftless(part: EmulatedSequence) -> EmulatedSequence:
    return dataclasses.replace(part, shift=torch.zeros_like(part.shift))


FAULTS = (
    Fault("mask off by one key", problem=_one_key_off),
    Fault("key length taken for a whole number of blocks", operands=_sees_padding),
    Fault("last key block left out", sums=_last_block_left_out),
    Fault("K scale of the block before", operands=_rolled("keys", "scale", 2)),
    Fault("Q scale of the row before", operands=_rolled("queries", "scale", 2)),
    Fault("K and V of the head before", operands=_heads),
    Fault(
        "scale of a head dim padded to twice its size",
        problem=lambda problem, _: dataclasses.replace(problem, scale=problem.scale / 2**0.5),
    ),
    Fault("older sums not scaled to the new maximum", sums=partial(_summed, decays=False)),
    Fault("mean of V not added back", FP8_KERNELS, operands=_without("values", "owed")),
    Fault("V scale of the channel before", FP8_KERNELS, operands=_rolled("values", "scale", 2)),
    Fault("P not raised to FP8's range", FP8_KERNELS, recipe=FlatP),
    Fault("P V summed in 13 bits (one level)", FP8_KERNELS, sums=partial(_summed, one_level=True)),
    Fault("LSE without the mean of K", operands=_shiftless),
)
