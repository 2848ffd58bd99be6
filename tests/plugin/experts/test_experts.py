"""Experts of mixtures on grouped linears: by `patch`, and by their name."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers")

import sage_plugin
from sage_plugin.errors import PatchError, UnsupportedInputError
from sage_plugin.kernels.fallback import Fallback
from sage_plugin.kernels.linear.quantizer import BY_TORCH
from sage_plugin.plugin.experts import layer as experts_layer
from sage_plugin.plugin.policy.rules import Policy, Rule
from tests.plugin.experts.mixtures import NAMES, experts_of, logits, mixture

ONLY_EXPERTS = {"kernel": "sdpa", "include": "*experts"}
PATH = "model.model.layers.0.mlp.experts"


def rows_of(handle) -> dict[str, object]:
    return {row.layer: row for row in handle.report().linears if row.role == "experts"}


@pytest.mark.parametrize("name", NAMES)
def test_a_patched_mixture_is_nearly_the_stock_one_and_comes_back_to_the_bit(name: str) -> None:
    model = mixture(name)
    before, bits = logits(model), {k: v.clone() for k, v in model.state_dict().items()}
    kind, parameter = type(experts_of(model)), experts_of(model).down_proj
    handle = sage_plugin.patch(model, linears="int8_row", **ONLY_EXPERTS)
    after = logits(model)
    assert 0 < (after - before).norm() / before.norm() < 0.03
    row = rows_of(handle)[PATH]
    assert (row.kernel, row.calls, row.fallbacks) == ("int8_row", {"int8_row:emulation": 1}, {})
    assert row.saved_bytes < 0  # beside the originals
    copied = copy.deepcopy(model)
    assert type(experts_of(copied)) is kind
    assert torch.equal(logits(copied), before)
    handle.unpatch()
    assert torch.equal(logits(model), before)
    assert type(experts_of(model)) is kind
    assert experts_of(model).down_proj is parameter
    assert all(torch.equal(bits[key], value) for key, value in model.state_dict().items())


def test_tokens_that_go_elsewhere_add_nothing() -> None:
    model = mixture("qwen3_moe")
    experts = experts_of(model)
    x, weights = torch.randn(8, 32), torch.rand(8, 3)
    chosen = torch.randint(0, 7, (8, 3))  # 6 is elsewhere
    with torch.no_grad():
        stock = experts(x, chosen.clamp(max=5), weights.masked_fill(chosen == 6, 0.0))
        sage_plugin.patch(model, linears="int8_row", **ONLY_EXPERTS)
        assert (experts(x, chosen, weights) - stock).norm() / stock.norm() < 0.03


@pytest.mark.parametrize("unseen", [False, True], ids=["written", "written through .data"])
def test_weights_that_are_written_are_quantized_anew(unseen: bool) -> None:
    model = mixture("mixtral")
    sage_plugin.patch(model, linears="int8_row", **ONLY_EXPERTS)
    logits(model)
    weight = experts_of(model).down_proj
    with torch.no_grad():
        (weight.data if unseen else weight).mul_(3.0)
    if unseen:
        sage_plugin.refresh(model)
    changed = logits(model)
    fresh = mixture("mixtral")
    with torch.no_grad():
        experts_of(fresh).down_proj.mul_(3.0)
    sage_plugin.patch(fresh, linears="int8_row", **ONLY_EXPERTS)
    assert torch.equal(changed, logits(fresh))


def test_originals_that_are_freed_cannot_come_back() -> None:
    model = mixture("mixtral")
    before = logits(model)
    handle = sage_plugin.patch(model, linears="int8_row", keep_originals=False, **ONLY_EXPERTS)
    assert (logits(model) - before).norm() / before.norm() < 0.03
    assert experts_of(model).down_proj.is_meta
    assert rows_of(handle)[PATH].saved_bytes > 0
    model.to(torch.float32)
    assert logits(model).isfinite().all()
    for denied in (handle.unpatch, model.state_dict, lambda: copy.deepcopy(model)):
        with pytest.raises(PatchError, match="freed by keep_originals=False"):
            denied()


STAYS = {
    "a gradient": (lambda model: model(torch.ones(1, 3, dtype=torch.long)), {}, Fallback.GRADIENT),
    "auto on a CPU": (logits, {"linears": "auto"}, Fallback.LINEAR_ON_CPU),
    "one scale": (logits, {"linears": "fp8_tensor"}, Fallback.EXPERTS_KERNEL),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_no_kernel_takes_runs_as_ever_and_is_counted(name: str) -> None:
    run, options, cause = STAYS[name]
    model = mixture("mixtral")
    before = run(model)
    handle = sage_plugin.patch(model, **{"linears": "int8_row", **ONLY_EXPERTS, **options})
    after = run(model)
    assert torch.equal(getattr(after, "logits", after), getattr(before, "logits", before))
    assert [why.cause for why in rows_of(handle)[PATH].fallbacks] == [cause]


def test_strict_mode_raises_where_experts_cannot_be_run() -> None:
    model = mixture("mixtral")
    sage_plugin.patch(model, linears="fp8_tensor", on_unsupported="error", **ONLY_EXPERTS)
    with pytest.raises(UnsupportedInputError, match="fp8_tensor multiplies no groups"):
        logits(model)


@pytest.mark.parametrize("op", ["linear", "grouped_linear"])
def test_a_rule_of_a_policy_chooses_the_kernel_of_experts(op: str) -> None:
    model = mixture("mixtral")
    rules = (
        Rule("sdpa"),
        Rule("int8_row", layers=("*layers.0.*",), op=op),
    )
    handle = sage_plugin.patch(model, policy=Policy(1, rules), min_seq=0)
    logits(model)
    assert rows_of(handle)[PATH].rules == {2: 1}
    assert list(rows_of(handle)) == [PATH]
    # rules of grouped linears are of experts alone
    assert (len(handle.report().linears) == 1) == (op == "grouped_linear")


def test_a_second_patch_changes_experts_in_place() -> None:
    model = mixture("mixtral")
    handle = sage_plugin.patch(model, linears="int8_row", **ONLY_EXPERTS)
    first = vars(experts_of(model))[experts_layer.SLOT]
    assert sage_plugin.patch(model, linears="int8_row", **ONLY_EXPERTS) is handle
    assert vars(experts_of(model))[experts_layer.SLOT] is first
    sage_plugin.patch(model, linears="fp8_row", **ONLY_EXPERTS)
    logits(model)
    assert rows_of(handle)[PATH].kernel == "fp8_row"
    with pytest.raises(PatchError, match="patched already"):
        sage_plugin.patch(model.model.layers[0], linears="int8_row", **ONLY_EXPERTS)
    sage_plugin.patch(model, kernel="sdpa")
    assert experts_layer.SLOT not in vars(experts_of(model))


def test_a_token_is_quantized_once_for_all_of_its_experts(monkeypatch) -> None:
    seen = []

    def counted(x, form, smooth=None, prologue=None, kept=None, copies=None):
        seen.append(tuple(x.shape))
        return BY_TORCH(x, form, smooth, prologue, kept, copies)

    monkeypatch.setattr(
        "sage_plugin.kernels.grouped_linear.experts.quantizer_of", lambda where: counted
    )
    model = mixture("qwen3_moe")
    sage_plugin.patch(model, linears="int8_row", **ONLY_EXPERTS)
    logits(model)
    assert seen == [(24, 32), (72, 48)] * 2


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_experts_run_by_their_name(name: str) -> None:
    named = sage_plugin.register(kernel="sdpa", experts="int8_row")
    model = mixture(name)
    stock = logits(model)
    model.set_experts_implementation("sage_plugin")
    by_name = logits(model)
    assert 0 < (by_name - stock).norm() / stock.norm() < 0.03
    rows = [row for row in named.report().linears if row.role == "experts"]
    assert sum(row.calls.get("int8_row:emulation", 0) for row in rows) >= 2
    # a patch goes before the name
    with sage_plugin.patched(model, linears="int8_row", **ONLY_EXPERTS):
        assert torch.equal(logits(model), by_name)
    sage_plugin.register()
    assert (logits(copy.deepcopy(model)) - stock).norm() / stock.norm() < 1e-5  # auto, on a CPU


def test_the_name_is_in_both_registries() -> None:
    from transformers.integrations import finegrained_fp8, moe

    sage_plugin.register()
    for registry in (moe.ALL_EXPERTS_FUNCTIONS, finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS):
        assert "sage_plugin" in registry


def test_a_patched_mixture_is_one_graph() -> None:
    model = mixture("mixtral")
    experts = experts_of(model)
    sage_plugin.patch(model, linears="int8_row", **ONLY_EXPERTS)
    x, chosen, weights = torch.randn(8, 32), torch.randint(0, 4, (8, 2)), torch.rand(8, 2)
    with torch.no_grad():
        eager = experts(x, chosen, weights)
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, chosen, weights), eager)
