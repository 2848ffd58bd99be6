"""Operations and bytes against counts by hand."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from sage_plugin.families.attention import cost
from sage_plugin.families.attention.cost import (
    flops,
    moved_bytes,
    quantizes,
    visible_pairs,
    weighed_pairs,
)
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams, PlainOperands
from sage_plugin.measure.inputs import presets, self_attention, synthetic


@pytest.mark.parametrize("seq_q", [1, 2, 5, 9])
@pytest.mark.parametrize("seq_k", [1, 4, 5, 9])
def test_causal_pairs_are_those_of_the_mask(seq_q, seq_k):
    rows = torch.arange(seq_q)[:, None] + (seq_k - seq_q)
    mask = torch.arange(seq_k)[None, :] <= rows
    assert visible_pairs(seq_q, seq_k, causal=True) == int(mask.sum())
    assert visible_pairs(seq_q, seq_k, causal=False) == seq_q * seq_k


def test_flops_of_the_first_preset():
    assert flops(presets()["cogvideox-2b"]) == 2 * 2 * 30 * 128 * 17776**2


def test_flops_count_query_heads_and_both_widths():
    shape = dataclasses.replace(self_attention(3, 4, 5, 8), heads_k=2, seq_k=7, dv=16, causal=True)
    # Rows 0..4 see 3, 4, 5, 6 and 7 keys.
    assert flops(shape) == 2 * 3 * 4 * (8 + 16) * 25


MASKS = {
    "padding": torch.arange(7).view(1, 1, 1, 7) < torch.tensor([3, 6]).view(2, 1, 1, 1),
    "bias of heads": torch.tensor([0.0, -1e4, -torch.inf, 2.0, -2e38, 0.5, -1e37])
    * torch.tensor([1.0, 1.0, 0.4, 1.0]).view(1, 4, 1, 1),
    "half bias": torch.tensor([0.0, -6e4, -torch.inf, 2.0, 0.0, 0.0, 0.0]).half().view(1, 1, 1, 7),
    "dense bool": torch.rand(1, 1, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.5,
    "dense float": torch.where(
        torch.rand(2, 4, 5, 7, generator=torch.Generator().manual_seed(1)) < 0.5, 1.0, -torch.inf
    ),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_pairs_of_masks_are_counted_one_by_one(name, causal, monkeypatch):
    mask = MASKS[name]
    shape = dataclasses.replace(
        self_attention(2, 4, 5, 8), heads_k=2, seq_k=7, causal=causal, mask_kind="dense"
    )
    expected = 0
    for b, h, i, j in itertools.product(range(2), range(4), range(5), range(7)):
        value = mask[b % len(mask), h % mask.shape[1], i % mask.shape[2], j].item()
        seen = value if mask.dtype == torch.bool else value >= -1e38
        expected += seen and (not causal or j <= i + 2)
    assert weighed_pairs(shape, mask) == expected < 2 * 4 * 5 * 7
    assert flops(shape, mask) == 2 * (8 + 8) * expected
    monkeypatch.setattr(cost, "CHUNK_ELEMENTS", 1)
    assert weighed_pairs(shape, mask) == expected


@pytest.mark.parametrize("kernel", ["torch", "sdpa", "fav2"])
@pytest.mark.parametrize("size", [(1, 1, 1, 64), (2, 1, 1, 64), (1, 1, 64, 64), (2, 4, 64, 64)])
def test_a_mask_is_read_once_as_it_lies_and_is_no_quantization(kernel, size):
    shape = self_attention(2, 4, 64, 32)
    plain, _ = cpu_bytes(kernel, shape)
    for mask in (torch.ones(size, dtype=torch.bool), torch.zeros(size)):
        masked, _ = cpu_bytes(kernel, shape, mask)
        assert masked - plain == mask.numel() * mask.element_size()
        problem = AttentionParams(shape.scale, shape.causal, shape.layout, mask)
        assert not quantizes(PlainOperands(mask, mask, mask, problem, None))


@pytest.mark.parametrize("kernel", ["sage", "fav3_fp8"])
def test_emulations_read_the_mask_beside_their_quantized_operands(kernel):
    shape = self_attention(2, 4, 64, 32)
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool)
    assert cpu_bytes(kernel, shape, mask)[0] - cpu_bytes(kernel, shape)[0] == 2 * 64 * 64


@dataclasses.dataclass(frozen=True)
class Portable:
    """Operands with the fields of the portable kernels that matter here."""

    k8: torch.Tensor
    k_scale: torch.Tensor
    k_scale_finite: torch.Tensor
    key_term: torch.Tensor
    shift: torch.Tensor
    problem: AttentionParams


@pytest.mark.parametrize(
    ("causal", "size", "read"),
    [
        (False, None, 1000 + 4 * 8),
        (True, None, 1000 + 4 * 8 + 4 * 300),
        (False, (2, 1, 1, 150), 1000 + 4 * 8 + 4 * 300),
        (False, (2, 4, 1, 150), 1000 + 4 * 8 + 4 * 300 + 4 * 1200),
        (False, (1, 1, 150, 150), 1000 + 4 * 8 + 4 * 300 + 4 * 22500),
    ],
)
def test_a_portable_kernel_reads_terms_of_keys_in_place_of_one_bias_a_key(causal, size, read):
    shape = dataclasses.replace(self_attention(2, 4, 150, 32), causal=causal)
    mask = None if size is None else torch.zeros(size)
    numbers = [torch.zeros(8), torch.zeros(8), torch.zeros(300), torch.zeros(99)]
    operands = Portable(
        torch.zeros(1000, dtype=torch.int8), *numbers, AttentionParams(1.0, causal, "bhsd", mask)
    )
    assert moved_bytes(operands, shape) == read + 2 * 4 * 150 * 32 * 2
    assert quantizes(operands)


def cpu_bytes(kernel, shape, mask=None):
    q, k, v = synthetic(shape, device="cpu")
    decision = dispatch.decide(shape, dispatch.facts_of("cpu", None), kernel=kernel)
    built = implementation(decision.kernel, decision.variant)
    config = None
    if decision.variant != "host":
        key = dispatch.call_key(shape, decision)
        config = dispatch.default_launch(key, dispatch.facts_of("cpu", None))
    problem = AttentionParams(shape.scale, shape.causal, shape.layout, mask)
    operands = built.prepare(q, k, v, problem=problem, launch=config)
    return moved_bytes(operands, shape), config


@pytest.mark.parametrize("kernel", ["torch", "sdpa", "fav2"])
def test_bytes_without_quantization_are_the_four_tensors(kernel):
    shape = dataclasses.replace(self_attention(1, 4, 128, 64), heads_k=2)
    moved, _ = cpu_bytes(kernel, shape)
    assert moved == 2 * 128 * 64 * (4 + 2 + 2 + 4)


@pytest.mark.parametrize(("kernel", "v_bytes"), [("sage", 2), ("fav3_sage", 1), ("fav3_fp8", 1)])
def test_bytes_of_quantized_operands_have_their_true_sizes(kernel, v_bytes):
    shape = self_attention(1, 2, 256, 64)
    moved, config = cpu_bytes(kernel, shape)
    tensors = 2 * 256 * 64 * (1 + 1 + v_bytes + 2)  # INT8 or FP8 in, a bf16 output
    q_scales, k_scales = 2 * 256 * 4, 2 * (256 // config.block_n) * 4
    # Scale and mean of V, mean of K; FP8 values have a mean rounding error as well.
    channels = (3 if kernel == "sage" else 4) * 2 * 64 * 4
    assert moved == tensors + q_scales + k_scales + channels
