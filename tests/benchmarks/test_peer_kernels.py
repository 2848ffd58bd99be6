"""`benchmarks/peer_kernels.py`: how each peer is called, and what is said of those that are not."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from sage_plugin.kernels.attention.oracle import oracle
from sage_plugin.measure.inputs import self_attention, synthetic

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _tensors(heads_q: int = 4, heads_k: int = 2, seq: int = 96, head_dim: int = 64) -> Tensors:
    shape = self_attention(2, heads_q, seq, head_dim)
    q, k, v = synthetic(shape, device="cpu", distribution="biased")
    return q, k[:, :heads_k].contiguous(), v[:, :heads_k].contiguous()


def _named(found, name: str):
    return next(peer for peer in found.peers if peer.name == name)


def _error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return ((out.float() - exact).abs().sum() / exact.abs().sum()).item()


def test_packages_that_are_missing_are_named_once(peer_kernels: ModuleType) -> None:
    found = peer_kernels.timed_peers()
    assert [peer.name for peer in found.peers] == ["sdpa flash", "sdpa cudnn"]
    assert [sentence.split()[0] for sentence in found.left_out] == [
        "fa3-fwd", "sageattention", "comfy-kitchen", "flash-attn-4",
    ]  # fmt: skip
    assert found.versions.keys() == {"torch"}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "limit", "dtype"),
    [
        ("fa3 bf16", 0.005, torch.bfloat16),
        ("fa3 fp8", 0.08, torch.bfloat16),
        ("sageattention 1.0.6", 0.005, torch.float32),
    ],
)
def test_a_judged_peer_computes_the_call(
    name: str,
    limit: float,
    dtype: torch.dtype,
    causal: bool,
    peer_kernels: ModuleType,
    installed: ModuleType,
) -> None:
    q, k, v = _tensors()
    q[:, 1] *= 30  # heads of one group differ: the group's scale is that of the larger one
    exact, _ = oracle(q, k, v, is_causal=causal, scale=0.05)
    peer = _named(peer_kernels.judged_peers(), name)
    before = k.clone()
    out = peer.prepare(q, k, v, causal=causal, scale=0.05)()
    assert out.dtype == dtype
    assert _error(out, exact) < limit
    assert torch.equal(k, before)


def test_timed_peers_quantize_or_not_and_leave_k_alone(
    peer_kernels: ModuleType, installed: ModuleType
) -> None:
    q, k, v = _tensors()
    before = k.clone()
    found = peer_kernels.timed_peers()
    names = [peer.name for peer in found.peers]
    assert names[2:] == [
        "fa3 bf16", "fa3 fp8 kernel alone", "sageattention 1.0.6",
        "sageattention 1.0.6 kernel alone",
    ]  # fmt: skip
    exact, _ = oracle(q, k, v)
    for name in names[2:]:
        out = _named(found, name).prepare(q, k, v, causal=False, scale=0.125)()
        assert out.dtype == torch.bfloat16
        assert _error(out, exact) < 0.08, name
    assert torch.equal(k, before)


def test_only_the_peers_of_the_issue_hold_ours(
    peer_kernels: ModuleType, installed: ModuleType
) -> None:
    held = {peer.name: peer.against for peer in peer_kernels.judged_peers().peers if peer.against}
    assert held == {
        "fa3 fp8": ("fav3_sage", "fav3_fp8"),
        "sageattention 1.0.6": ("sage",),
    }


def test_sageattention_2_is_called_as_a_whole(
    peer_kernels: ModuleType, installed: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_kernels.importlib.metadata, "version", lambda name: "2.2.0")
    peer = _named(peer_kernels.judged_peers(), "sageattention 2.2.0")
    q, k, v = _tensors()
    assert peer.against == ("fav3_sage",)
    assert peer.prepare(q, k, v, causal=False, scale=0.1)().dtype == torch.bfloat16


def test_calls_that_a_peer_would_get_wrong_are_refused(
    peer_kernels: ModuleType, installed: ModuleType
) -> None:
    q, k, v = _tensors()
    found = peer_kernels.judged_peers()
    for name in ("sdpa flash", "sageattention 1.0.6"):
        with pytest.raises(peer_kernels.UnfitCallError):
            _named(found, name).prepare(q[:, :, :50], k, v, causal=True, scale=0.1)
    small = [x[..., :32].contiguous() for x in (q, k, v)]
    with pytest.raises(peer_kernels.UnfitCallError, match="head dim 32"):
        _named(found, "sageattention 1.0.6").prepare(*small, causal=False, scale=0.1)
    with pytest.raises(peer_kernels.UnfitCallError, match="bfloat16"):
        _named(found, "fa3 bf16").prepare(q.half(), k.half(), v.half(), causal=False, scale=0.1)


def test_e4m3_uses_its_whole_range_and_zero_stays_zero(peer_kernels: ModuleType) -> None:
    x = torch.randn(2, 40, 4, 16, generator=torch.Generator().manual_seed(0))
    x[1, :, 2:] = 0.0
    values, descale = peer_kernels.e4m3_per_head(x, 2)
    largest = values.float().abs().amax(dim=(1, 3)).view(2, 2, 2).amax(-1)
    assert largest.tolist() == [[448.0, 448.0], [448.0, 0.0]]
    assert torch.isfinite(values.float()).all()
    again = values.float() * descale.repeat_interleave(2, dim=1)[:, None, :, None]
    assert (again - x).abs().max() < 0.07 * x.abs().max()
