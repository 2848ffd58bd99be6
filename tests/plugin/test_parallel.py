"""Models spread over two processes: diffusers exchanges a sequence, transformers shards linears."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import sage_plugin
from sage_plugin.kernels.attention.api import attention
from sage_plugin.kernels.attention.call import AttentionCall
from sage_plugin.plugin.hosts import parallel
from tests.plugin import spread
from tests.plugin.spread import Run

KERNELS = {"fav2": "", "sage": "int8_row"}
"""Kernels of attention, each with that of the linears."""
SPREAD = [
    Run(m, k, w, on)
    for m in spread.MODELS
    for k, on in KERNELS.items()
    for w in ("ulysses", "ring")
]
LINEARS = {
    "wan": {"int8_row:emulation": 18, "int8_row:emulation+gelu_tanh": 2},
    "flux": {"int8_row:emulation": 15, "int8_row:emulation+gelu_tanh": 2},
}
"""Linears of a model that run on a kernel, by what they run on."""
SHARDED = [
    *(Run("llama", kernel, spread.TP, linears) for kernel, linears in KERNELS.items()),
    Run("mixtral", "sage", spread.TP, "int8_row"),
    Run("flux", "sage", spread.SHARDS, "int8_row"),
]
CASES = [
    *SPREAD,
    *SHARDED,
    *(Run(model, "", spread.TP) for model in spread.LANGUAGE_MODELS),
    *(Run(m, k, "ulysses") for m in spread.MODELS for k in ("", "sdpa")),
    Run("wan", "", "ring", raises=True),
    Run("wan", "sdpa", "ring", raises=True),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    return spread.results(CASES, tmp_path_factory.mktemp("spread"))


@pytest.fixture(scope="module")
def whole():
    """Outputs of each model on one device, unpatched and on each kernel."""
    outputs = {}
    for model in spread.MODELS:
        network, arguments = spread.build(model)
        outputs |= alone(model, network, arguments)
    for model, make in spread.LANGUAGE_MODELS.items():
        outputs |= alone(model, make(), spread.sentence())
    return outputs


def alone(model, network, arguments):
    """Outputs of a model in one process, unpatched and on each kernel."""
    outputs = {(model, ""): spread.forward(network, arguments)}
    for run in (Run(model, kernel, "", linears) for kernel, linears in KERNELS.items()):
        with sage_plugin.patched(network, **run.options):
            outputs[model, run.kernel] = spread.forward(network, arguments)
    return outputs


@pytest.mark.parametrize("case", SPREAD, ids=lambda case: case.name)
def test_all_processes_get_the_output_of_one_device(case, found, whole):
    exact, usual = whole[case.model, ""], whole[case.model, case.kernel]
    for out, _, _ in found[case.name]:
        # Ulysses gathers whole heads, so that a kernel sees what it sees on one device.
        if case.way == "ulysses" or case.kernel == "fav2":
            assert (out - usual).abs().max() < 1e-5
        assert (out - exact).abs().mean() < 2 * (usual - exact).abs().mean() + 1e-6
        assert case.kernel == "fav2" or (out - exact).abs().max() > 1e-4


@pytest.mark.parametrize("case", SPREAD, ids=lambda case: case.name)
def test_each_part_is_a_call_on_the_kernel(case, found):
    label = f"{case.kernel}:emulation"
    parts = 2 if case.way == "ring" else 1
    for _, rows, _ in found[case.name]:
        attention = [row for row in rows if row[0].endswith(("attn", "attn1"))]
        assert attention
        assert all(calls == {label: parts} and not why for _, calls, why in attention)
        # Cross attention to twelve tokens of text stays where it was.
        for _, calls, why in (row for row in rows if row[0].endswith("attn2")):
            assert (calls, why) == ({}, {"shorter than min_seq 32": 1})
        on_linears = Counter(
            label for _, calls, _ in rows for label in calls if label.startswith("int8")
        )
        assert on_linears == (LINEARS[case.model] if case.linears else {})


@pytest.mark.parametrize("case", SHARDED, ids=lambda case: case.name)
def test_each_process_multiplies_its_shards_before_their_sum(case, found, whole):
    exact, usual = whole[case.model, ""], whole[case.model, case.kernel]
    limit = 2 * (usual - exact).abs().mean() if case.linears else 1e-5
    for out, rows, wrong in found[case.name]:
        assert not wrong
        assert (out - exact).abs().mean() < limit
        assert len(rows) == 2 + {"llama": 14, "mixtral": 10, "flux": 17}[case.model] * bool(
            case.linears
        )
        label = f"{case.kernel}:emulation"
        for layer, calls, why in rows:
            on = label if layer.endswith("attn") else "int8_row:emulation"
            assert (calls, why) == ({on: 1}, {}), layer


@pytest.mark.parametrize("model", spread.LANGUAGE_MODELS)
def test_transformers_spreads_a_model_as_these_tests_think(model, found, whole):
    for out, _, _ in found[f"{model}-unpatched-tp"]:
        assert (out - whole[model, ""]).abs().mean() < 1e-5


@pytest.mark.parametrize("model", spread.MODELS)
def test_the_host_s_kernel_is_the_host(model, found):
    for mine, theirs in zip(
        found[f"{model}-sdpa-ulysses"], found[f"{model}-unpatched-ulysses"], strict=True
    ):
        assert torch.equal(mine[0], theirs[0])


def test_what_the_host_refuses_stays_refused(found):
    for mine, theirs in zip(found["wan-sdpa-ring"], found["wan-unpatched-ring"], strict=True):
        assert "return_lse" in mine[2]
        assert mine[2] == theirs[2]


def test_the_decision_sees_gathered_lengths_and_shared_heads():
    q = torch.randn(2, 10, 6, 8)
    call = AttentionCall(q, q, q, torch.ones(10, dtype=torch.bool), 0.0, False, None, False, "bshd")
    seen = parallel.as_exchanged(call, parallel.Degrees(3, 1))
    assert seen.q.shape == seen.k.shape == seen.v.shape == (2, 30, 2, 8)
    assert seen.attn_mask is None
    assert parallel.as_exchanged(call, parallel.Degrees(1, 2)).k.shape == (2, 10, 6, 8)


def test_parts_merge_by_our_lse_to_the_whole():
    """What a ring does with two halves of the keys, on a kernel that smooths each half's K."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 40, 2, 32, generator=generator) for _ in range(3))
    k = k + 5 * torch.randn(32, generator=generator)
    halves = []

    def exchange(q, k, v, mask, dropout, causal, scale, gqa, lse, *, forward_op, **rest):
        for half in (slice(0, 20), slice(20, 40)):
            halves.append(forward_op(None, q, k[:, half], v[:, half], None, 0.0, False, None, False,
                                     True))  # fmt: skip
        (out, lse), (more, other) = halves
        weight = torch.sigmoid(other - lse)[..., None]
        return out + weight * (more - out)

    def attend(host, call, blocked):
        assert call.return_lse
        assert blocked is None
        return attention(call.q, call.k, call.v, kernel="sage", layout="bshd", return_lse=True)

    call = AttentionCall(q, k, v, None, 0.0, False, None, False, "bshd")
    out = parallel.attention(exchange, attend, call, None)
    assert halves[0][1].shape == (1, 40, 2)
    exact = attention(q, k, v, kernel="torch", layout="bshd")
    assert (out - exact).abs().mean() < 0.01 * exact.abs().mean()
