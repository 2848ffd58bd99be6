"""Linears that are left as they are, each by name, and those that only look so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

import accelerate
from diffusers.hooks import apply_group_offloading
from torch import nn
from torch.nn.utils import parametrize

import sage_plugin
from sage_plugin.errors import PatchError
from sage_plugin.kernels.fallback import Fallback
from sage_plugin.plugin.linears.module import QuantizedLinear
from tests.plugin.tiny import Pipeline, Tiny, tiny
from tests.plugin.toys import Direct, ToyAttention

NAME = "transformer.transformer_blocks.0.attn1.to_q"


def query_of(model: Tiny) -> nn.Linear:
    return model.module.transformer_blocks[0].attn1.to_q


def replace(model: Tiny, kind: type[nn.Linear]) -> None:
    old = query_of(model)
    new = kind(old.in_features, old.out_features)
    new.load_state_dict(old.state_dict())
    model.module.transformer_blocks[0].attn1.to_q = new


def tie(model: Tiny) -> None:
    query_of(model).weight = model.module.transformer_blocks[1].attn1.to_q.weight


def overlap(model: Tiny) -> None:
    attention = model.module.transformer_blocks[0].attn1
    both = torch.cat([attention.to_q.weight.data, attention.to_k.weight.data])
    query_of(model).weight.data = both[: attention.to_q.out_features]
    attention.register_buffer("qk", both)


class Another(nn.Linear):
    """Somebody's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 1.0


class Int8Linear(nn.Linear):
    """As a library has it."""

    __module__ = "bitsandbytes.nn.modules"


class Wrapped(torch.Tensor):
    """As torchao has it."""


class Negative(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return -weight


def set_forward(model: Tiny) -> None:
    query = query_of(model)
    query.forward = query.forward  # type: ignore[method-assign]


def wrapped_weight(model: Tiny) -> None:
    query = query_of(model)
    query.weight = nn.Parameter(query.weight.data.as_subclass(Wrapped), requires_grad=False)


def double(model: Tiny) -> None:
    query_of(model).to(torch.float64)


def with_gradient(model: Tiny) -> None:
    query_of(model).weight.grad = torch.zeros(32, 32)


def sequential_offload(model: Tiny) -> None:
    accelerate.hooks.add_hook_to_module(query_of(model), accelerate.hooks.AlignDevicesHook())


def group_offload(model: Tiny) -> None:
    here = torch.device("cpu")
    apply_group_offloading(model.module, here, here, offload_type="leaf_level")


CASES: dict[str, tuple[Any, Fallback, int]] = {
    "tied": (tie, Fallback.LINEAR_TIED, 10),
    "part of a buffer": (overlap, Fallback.LINEAR_TIED, 11),
    "own class": (lambda m: replace(m, Another), Fallback.LINEAR_CLASS, 11),
    "quantized": (lambda m: replace(m, Int8Linear), Fallback.LINEAR_QUANTIZED, 11),
    "parametrized": (
        lambda m: parametrize.register_parametrization(query_of(m), "weight", Negative()),
        Fallback.LINEAR_CLASS,
        11,
    ),
    "own forward": (set_forward, Fallback.LINEAR_FORWARD, 11),
    "tensor subclass": (wrapped_weight, Fallback.LINEAR_WEIGHT, 11),
    "fp64": (double, Fallback.DTYPE, 11),
    "with a gradient": (with_gradient, Fallback.GRADIENT, 11),
    "hook of accelerate": (sequential_offload, Fallback.LINEAR_OFFLOADED, 11),
    "group offload": (group_offload, Fallback.LINEAR_OFFLOADED, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_a_linear_that_is_not_plain_is_left_alone_by_name(case):
    change, cause, taken = CASES[case]
    model = tiny("cogx")
    change(model)
    kind = type(query_of(model))
    handle = sage_plugin.patch(model.module, kernel="sdpa", linears="int8_row", min_seq=0)
    report = handle.report()
    assert type(query_of(model)) is kind
    assert len(report.linears) == taken
    assert report.linears_left[NAME] == str(handle._parts[0].linears.left[NAME.split(".", 1)[1]])
    assert handle._parts[0].linears.left[NAME.split(".", 1)[1]].cause is cause
    handle.unpatch()


def test_tied_weights_stay_tied_and_shared_modules_are_patched_once():
    model = tiny("cogx")
    first, second = model.module.transformer_blocks
    second.attn1 = first.attn1
    handle = sage_plugin.patch(model.module, kernel="sdpa", linears="int8_row", min_seq=0)
    assert type(first.attn1.to_q) is QuantizedLinear
    model.run()
    calls = {row.layer: row.total_calls() for row in handle.report().linears}
    assert calls[NAME] == 2
    assert len(calls) == 8
    handle.unpatch()
    assert second.attn1 is first.attn1


def test_linears_that_came_in_are_named_until_refresh_takes_them():
    model = tiny("cogx")
    handle = sage_plugin.patch(model.module, kernel="sdpa", linears="int8_row", min_seq=0)
    old = query_of(model)
    replace(model, nn.Linear)
    report = handle.report()
    assert report.linears_left[NAME] == "came in after patch; call refresh"
    assert report.lost == (NAME,)
    model.module.fuse_qkv_projections()
    fused = "transformer.transformer_blocks.1.attn1.to_qkv"
    assert handle.report().linears_left[fused] == "came in after patch; call refresh"
    sage_plugin.refresh(model.module)
    names = {row.layer for row in handle.report().linears}
    assert {NAME, fused} <= names
    assert type(old) is nn.Linear
    assert handle.report().lost == ()


def test_a_patched_pipeline_is_freed_and_only_its_denoiser_was_patched():
    model = tiny("cogx")
    encoder = nn.Sequential(nn.Linear(32, 32))
    pipe = Pipeline(transformer=model.module, text_encoder=encoder, scheduler=SimpleNamespace())
    handle = sage_plugin.patch(pipe, kernel="sdpa", linears="int8_row", min_seq=0)
    assert type(encoder[0]) is nn.Linear
    layer = query_of(model)._sage_linear
    assert layer.quantized is not None
    del model, pipe
    assert layer.quantized is None
    assert len(handle.report().linears) == 12


def test_hooks_that_come_later_run_the_patched_linear():
    model = tiny("cogx")
    handle = sage_plugin.patch(model.module, kernel="sdpa", linears="int8_row", min_seq=0)
    ours = model.run()
    accelerate.hooks.add_hook_to_module(model.module, accelerate.hooks.CpuOffload("cpu"))
    accelerate.hooks.add_hook_to_module(query_of(model), accelerate.hooks.AlignDevicesHook())
    assert float((model.run() - ours).norm() / ours.norm()) < 2e-3  # GELU is made by itself
    accelerate.hooks.remove_hook_from_submodules(model.module)
    here = torch.device("cpu")
    apply_group_offloading(model.module, here, here, offload_type="leaf_level")
    assert float((model.run() - ours).norm() / ours.norm()) < 2e-3  # GELU is made by itself
    plain = tiny("cogx").run()
    handle.unpatch()
    assert type(query_of(model)) is nn.Linear
    assert torch.equal(model.run(), plain)


class Away(torch.Tensor):
    """As a `DTensor` whose shard waits on another device: it has facts and allows no operation."""

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        raise RuntimeError(f"{op} of a tensor whose data is elsewhere")


def test_a_report_runs_no_operation_on_tensors_of_other_kinds():
    model = tiny("wan")
    with sage_plugin.patched(model.module, linears="int8_row", min_seq=1) as handle:
        model.run()
        away = torch.Tensor._make_wrapper_subclass(Away, (4, 4), dtype=torch.float32)
        model.module.register_buffer("elsewhere", away)
        report = handle.report()
        del model.module.elsewhere
    assert len(report.linears) == 20
    assert "transformer.proj_out" in report.linears_left


def test_a_linear_that_is_patched_as_a_part_of_another_model_is_refused():
    model = tiny("cogx")
    first = sage_plugin.patch(model.module, kernel="sdpa", linears="int8_row", exclude="*.1.*")
    outer = nn.ModuleDict({"inner": model.module, "attn": ToyAttention(Direct())})
    with pytest.raises(PatchError, match="is patched already, as transformer"):
        sage_plugin.patch(outer, linears="int8_row", include=["attn", "*to_q"])
    first.unpatch()
