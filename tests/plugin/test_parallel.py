"""A sequence spread over two processes: diffusers exchanges it, our kernels attend to it."""

from __future__ import annotations

import pytest
import torch

import sage_plugin
from sage_plugin.kernels.attention.api import attention
from sage_plugin.kernels.attention.call import AttentionCall
from sage_plugin.plugin.hosts import parallel
from tests.plugin import spread
from tests.plugin.spread import Run

KERNELS = ("fav2", "sage")
CASES = [
    *(Run(m, k, w) for m in spread.MODELS for k in KERNELS for w in ("ulysses", "ring")),
    *(Run(m, k, "ulysses") for m in spread.MODELS for k in ("", "sdpa")),
    Run("wan", "", "ring", raises=True),
    Run("wan", "sdpa", "ring", raises=True),
]
SPREAD = [case for case in CASES if case.kernel in KERNELS]


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
        outputs[model, ""] = spread.forward(network, arguments)
        for kernel in KERNELS:
            with sage_plugin.patched(network, kernel=kernel, min_seq=32):
                outputs[model, kernel] = spread.forward(network, arguments)
    return outputs


@pytest.mark.parametrize("case", SPREAD, ids=lambda case: case.name)
def test_all_processes_get_the_output_of_one_device(case, found, whole):
    exact, alone = whole[case.model, ""], whole[case.model, case.kernel]
    for out, _, _ in found[case.name]:
        # Ulysses gathers whole heads, so that a kernel sees what it sees on one device.
        if case.way == "ulysses" or case.kernel == "fav2":
            assert (out - alone).abs().max() < 1e-5
        assert (out - exact).abs().mean() < 2 * (alone - exact).abs().mean() + 1e-6
        assert case.kernel == "fav2" or (out - exact).abs().max() > 1e-4


@pytest.mark.parametrize("case", SPREAD, ids=lambda case: case.name)
def test_each_part_is_a_call_on_the_kernel(case, found):
    label = f"{case.kernel}:emulation"
    parts = 2 if case.way == "ring" else 1
    for _, rows, _ in found[case.name]:
        spread_rows = [row for row in rows if "attn2" not in row[0]]
        assert spread_rows
        assert all(calls == {label: parts} and not why for _, calls, why in spread_rows)
        # Cross attention to twelve tokens of text stays where it was.
        for _, calls, why in (row for row in rows if "attn2" in row[0]):
            assert (calls, why) == ({}, {"shorter than min_seq 32": 1})


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
