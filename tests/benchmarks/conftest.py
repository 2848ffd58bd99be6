"""The benchmarks' modules as their scripts import them, and stand-ins for the peers' packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sage_plugin.kernels.attention.oracle import oracle

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
PACKAGES = ("fa3_fwd_interface", "sageattention.core", "comfy_kitchen", "flash_attn.cute")
VERSIONS = {"sageattention": "1.0.6", "fa3-fwd": "0.0.3"}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No GPU, no configs, and none of the peers that this machine may have."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    for name in ("CONFIG_DIR", "KERNEL", "VARIANT", "LAUNCH", "DISABLE"):
        monkeypatch.delenv(f"SAGE_PLUGIN_{name}", raising=False)
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def accuracy() -> ModuleType:
    return importlib.import_module("accuracy")


@pytest.fixture
def accuracy_inputs() -> ModuleType:
    return importlib.import_module("accuracy_inputs")


@pytest.fixture
def peers() -> ModuleType:
    return importlib.import_module("peers")


@pytest.fixture
def peer_kernels() -> ModuleType:
    return importlib.import_module("peer_kernels")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """FA3 and SageAttention 1 as exact attention behind the real packages' arguments.

    The module returned is FA3's; a test may put another `gain` on its outputs.
    """
    fa3, core = ModuleType("fa3_fwd_interface"), ModuleType("sageattention.core")
    fa3.gain = 1.0  # type: ignore[attr-defined]
    fa3.flash_attn_func = lambda *args, **kw: fa3.gain * _fa3(*args, **kw)  # type: ignore[attr-defined]
    for name in ("per_block_int8", "per_block_int8_hd96"):
        setattr(core, name, _per_block)
    core.sageattn = _sageattn  # type: ignore[attr-defined]
    for name, causal in (("attn_true", True), ("attn_false", False)):
        setattr(core, name, lambda *args, _causal=causal, **kw: _sage1(*args, causal=_causal, **kw))
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", fa3)
    monkeypatch.setitem(sys.modules, "sageattention.core", core)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: VERSIONS.get(name, "1"))
    return fa3


def _fa3(q, k, v, *, softmax_scale, causal, q_descale=None, k_descale=None, v_descale=None):
    """`(B, S, H, D)` in and out; descale factors are `(B, Hk)`, and FP8 gives bf16."""
    heads_k = k.shape[2]
    tensors = []
    for x, descale in ((q, q_descale), (k, k_descale), (v, v_descale)):
        assert x.is_contiguous()
        if descale is None:
            assert x.dtype == torch.bfloat16
            tensors.append(x.float())
            continue
        assert x.dtype == torch.float8_e4m3fn
        assert descale.shape == (x.shape[0], heads_k)
        assert descale.dtype == torch.float32
        by_head = descale.repeat_interleave(x.shape[2] // heads_k, dim=1)
        tensors.append(x.float() * by_head[:, None, :, None])
    out, _ = oracle(*tensors, is_causal=causal, scale=softmax_scale, layout="bshd")
    return out.to(torch.bfloat16)


def _sageattn(q, k, v, *, tensor_layout, is_causal, sm_scale):
    assert tensor_layout == "HND"
    k -= k.mean(dim=2, keepdim=True)
    out, _ = oracle(q, k, v, is_causal=is_causal, scale=sm_scale)
    return out.to(q.dtype)


def _per_block(q, k, *, sm_scale, tensor_layout):
    """Exact: Q takes the scale as the real one does, in log2 units, and K has lost its mean."""
    assert tensor_layout == "HND"
    assert k.float().mean(2).abs().max() < 0.05
    return q.float() * sm_scale * 1.44269504, None, k.float(), None


def _sage1(q, k, v, q_scale, k_scale, *, tensor_layout, output_dtype, causal):
    assert q_scale is k_scale is None
    assert v.dtype == torch.float16
    out, _ = oracle(q, k, v, is_causal=causal, scale=1 / 1.44269504)
    return out.to(output_dtype)
