"""Patched linears, from `patch` to `unpatch`: outputs, weights, copies, files, readers."""

from __future__ import annotations

import copy
import io
import re

import pytest
import torch

pytest.importorskip("diffusers")

from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import prune

import sage_plugin
from sage_plugin.errors import ConfigError, PatchError, UnknownKernelError, UnsupportedInputError
from sage_plugin.kernels import notice
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.linear.weight import quantize_weight
from sage_plugin.plugin.linears.layer import LinearLayer
from sage_plugin.plugin.linears.module import QuantizedLinear
from sage_plugin.plugin.policy.rules import Policy, Rule
from tests.plugin.tiny import tiny

PATH = "transformer_blocks.0.attn1.to_q"
QUERY = f"transformer.{PATH}"


@pytest.fixture(params=[False, True], ids=["at home", "waiting"])
def _originals(request, monkeypatch):
    """Original weights that stay, as on a CPU, or that wait elsewhere, as those of a GPU."""
    if request.param:

        def send_away(self, weight):
            weight.data, self.waiting = weight.data.clone(), True

        monkeypatch.setattr(LinearLayer, "_send_away", send_away)


def patched_cogx(**options):
    model = tiny("cogx")
    options = {"kernel": "sdpa", "linears": "int8_row", "min_seq": 0, **options}
    return model, sage_plugin.patch(model.module, **options)


def query_of(model) -> nn.Linear:
    return model.module.transformer_blocks[0].attn1.to_q


def bits_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.usefixtures("_originals")
@pytest.mark.parametrize(
    ("kernel", "error"), [("fp8_row", 0.03), ("fp8_tensor", 0.03), ("int8_row", 0.012)]
)
def test_outputs_are_those_of_8_bits_and_unpatch_restores_all_bits(kernel, error):
    model = tiny("cogx")
    plain, bits, parameters = model.run(), bits_of(model.module), list(model.module.parameters())
    handle = sage_plugin.patch(model.module, kernel="sdpa", linears=kernel, min_seq=0)
    out = model.run()
    difference = float((out - plain).norm() / plain.norm())
    assert error / 30 < difference < error
    x = torch.randn(3, 5, 32)
    query = query_of(model)
    rows = quantize_weight(query.weight.detach(), kernel)
    with torch.no_grad():
        torch.testing.assert_close(
            query(x), sage_plugin.linear(x, rows, query.bias), rtol=0, atol=0
        )
    assert same(bits_of(model.module), bits)
    handle.unpatch()
    assert torch.equal(model.run(), plain)
    assert same(bits_of(model.module), bits)
    assert all(a is b for a, b in zip(parameters, model.module.parameters(), strict=True))
    assert not any(isinstance(m, QuantizedLinear) for m in model.module.modules())
    assert "_sage_linear" not in vars(query_of(model))


@pytest.mark.usefixtures("_originals")
def test_copies_pickles_and_files_are_of_the_plain_model(tmp_path):
    model, handle = patched_cogx()
    ours = model.run()
    plain = tiny("cogx")
    twin = copy.deepcopy(model.module)
    file = io.BytesIO()
    torch.save(model.module, file)
    file.seek(0)
    model.module.save_pretrained(tmp_path)
    for made in (
        twin,
        torch.load(file, weights_only=False),
        type(model.module).from_pretrained(tmp_path),
    ):
        assert torch.equal(model.run(made.eval()), plain.run())
        assert type(made.transformer_blocks[0].attn1.to_q) is nn.Linear
    assert torch.equal(model.run(), ours)
    assert handle.report().linears[0].total_calls() == 2


@pytest.mark.usefixtures("_originals")
@pytest.mark.parametrize(
    "way", ["in place", "data", "load", "assign", "attribute", "parameter", "unseen"]
)
def test_a_weight_that_is_written_is_quantized_anew(way):
    model, handle = patched_cogx()
    model.run()
    query = query_of(model)
    new = torch.randn(32, 32)
    if way == "in place":
        with torch.no_grad():
            query.weight.copy_(new)
    elif way == "data":
        query.weight.data += new - query.weight.data
    elif way == "parameter":
        with torch.no_grad():
            model.module.get_parameter(f"{PATH}.weight").copy_(new)
    elif way == "unseen":
        model.module.get_parameter(f"{PATH}.weight").data.copy_(new)
        sage_plugin.refresh(model.module)
    elif way == "attribute":
        query.weight = nn.Parameter(new)
    else:
        query.load_state_dict({"weight": new, "bias": query.bias.data}, assign=way == "assign")
    model.run()
    x = torch.randn(4, 32)
    with torch.no_grad():
        expected = sage_plugin.linear(x, query._sage_linear.quantized, query.bias)
        torch.testing.assert_close(expected, linear(x, new, query.bias), rtol=0, atol=0.2)
        assert torch.equal(query(x), expected)
    handle.unpatch()
    torch.testing.assert_close(query.weight.detach(), new, rtol=0, atol=1e-6)


def test_a_weight_may_be_written_between_any_two_forwards():
    model, handle = patched_cogx()
    ours, query = model.run(), query_of(model)
    bits = query.weight.detach().clone()
    for _ in range(4):
        query.weight.data += 1.0
        changed = model.run()
        query.weight.data.copy_(bits)
        assert torch.equal(model.run(), ours)
        assert not torch.equal(changed, ours)
    assert all(not row.fallbacks for row in handle.report().linears)


@pytest.mark.usefixtures("_originals")
def test_moves_and_casts_take_both_weights_along():
    model, handle = patched_cogx()
    model.run()
    model.module.to("cpu")
    layer = query_of(model)._sage_linear
    assert layer.ready
    data = layer.quantized.data
    model.module.to(torch.bfloat16)
    assert query_of(model)._parameters["weight"].dtype == torch.bfloat16
    assert layer.quantized.data.dtype == torch.int8
    assert layer.quantized.data is not data
    model.module.to(torch.float32)
    handle.unpatch()
    plain = tiny("cogx").module.to(torch.bfloat16).to(torch.float32)
    assert same(bits_of(model.module), bits_of(plain))


def test_originals_that_were_freed_are_missed_by_name():
    model, handle = patched_cogx(keep_originals=False)
    other, _ = patched_cogx()
    assert torch.equal(model.run(), other.run())
    query = query_of(model)
    assert query._parameters["weight"].is_meta
    model.module.to("cpu")
    for use in (
        model.module.state_dict,
        lambda: copy.deepcopy(model.module),
        lambda: query.weight,
        handle.unpatch,
        lambda: sage_plugin.patch(model.module, kernel="sdpa", linears="fp8_row"),
        lambda: sage_plugin.patch(model.module, kernel="sdpa", linears=None),
        lambda: model.module(**model.inputs),  # with a gradient
    ):
        with pytest.raises(PatchError, match=rf"{QUERY}: its original weight was freed"):
            use()
    assert torch.equal(model.run(), other.run())
    assert sum(row.saved_bytes for row in handle.report().linears) > 0


def test_a_model_that_reads_a_weight_itself_has_that_linear_to_itself():
    class Reader(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, **inputs):
            self.inner.transformer_blocks[0].attn1.to_q.weight.sum()
            return self.inner(**inputs)

    model = tiny("cogx")
    reader = Reader(model.module)
    handle = sage_plugin.patch(reader, kernel="sdpa", linears="int8_row", min_seq=0)
    for _ in range(4):
        model.run(reader)
    report = handle.report()
    name = "model.inner.transformer_blocks.0.attn1.to_q"
    reason = FallbackReason(Fallback.LINEAR_READ)
    assert report.linears_left[name] == str(reason)
    row = next(row for row in report.linears if row.layer == name)
    assert row.fallbacks[reason] == 3  # all but the first forward
    assert all(not other.fallbacks for other in report.linears if other is not row)


def test_a_call_that_needs_a_gradient_has_the_originals():
    model, handle = patched_cogx()
    plain = tiny("cogx")
    out, expected = (m.module(**m.inputs)[0] for m in (model, plain))
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(query_of(model).weight.grad, query_of(plain).weight.grad)
    reasons = {reason for row in handle.report().linears for reason in row.fallbacks}
    assert reasons == {FallbackReason(Fallback.GRADIENT)}
    with torch.no_grad():  # as an optimizer does
        for parameter in model.module.parameters():
            parameter.data *= 1.5
    other, _ = patched_cogx()
    with torch.no_grad():
        for parameter in other.module.parameters():
            parameter.data *= 1.5
    sage_plugin.refresh(other.module)
    assert torch.equal(model.run(), other.run())
    for _ in range(3):
        model.module(**model.inputs)
    assert set(handle.report().linears_left.values()) >= {"a gradient is needed"}


def test_a_linear_that_falls_back_is_told_once_or_raises(caplog):
    notice.forget()
    model, handle = patched_cogx()
    model.module(**model.inputs)
    model.module(**model.inputs)
    said = [r.message for r in caplog.records if "original weight" in r.message and r.levelno > 20]
    assert len(said) == 1
    assert "a gradient is needed" in said[0]
    handle.unpatch()
    strict, _ = patched_cogx(on_unsupported="error")
    with pytest.raises(UnsupportedInputError, match=rf"{QUERY}: a gradient is needed"):
        query_of(strict)(torch.randn(2, 32, requires_grad=True))
    strict.run()


def test_an_input_that_is_on_its_way_from_another_device_is_waited_for():
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    module = tiny("wan").module
    handle = sage_plugin.patch(module, kernel="sdpa", linears="int8_row")
    query, x = module.blocks[0].attn1.to_q, torch.randn(1, 20, 32)
    with torch.no_grad():
        assert torch.equal(query(AsyncCollectiveTensor(x)), query(x))
    (row,) = (r for r in handle.report().linears if r.layer == "transformer.blocks.0.attn1.to_q")
    assert (row.calls, row.fallbacks) == ({"int8_row:emulation": 2}, {})


def test_autocast_chooses_the_dtype_of_the_output():
    model, _ = patched_cogx()
    x = torch.randn(4, 32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = query_of(model)(x)
    assert out.dtype == torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(out.float(), query_of(model)(x), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    ("options", "patched"),
    [
        ({"include": "*attn1*"}, {"to_q", "to_k", "to_v", "to_out.0"}),
        ({"include": "*.attn1"}, {"to_q", "to_k", "to_v", "to_out.0"}),
        ({"exclude": "*.ff"}, {"to_q", "to_k", "to_v", "to_out.0"}),
        ({"exclude": ["*to_?", "*ff.net.0*", "*to_out*"]}, {"ff.net.2"}),
    ],
)
def test_globs_choose_linears_by_their_path_or_by_what_they_are_in(options, patched):
    model = tiny("cogx")
    kernel = {"kernel": "sdpa", "linears": "int8_row"}
    handle = sage_plugin.patch(model.module, **kernel, **options)
    names = {row.layer.split(".", 3)[3].removeprefix("attn1.") for row in handle.report().linears}
    assert names == patched
    left = handle.report().linears_left
    assert str(FallbackReason(Fallback.LINEAR_EXCLUDED)) in left.values()


def test_rules_of_a_policy_choose_the_kernel_of_each_linear():
    model = tiny("cogx")
    rules = (
        Rule("bf16", layers=("*ff.net.2",), op="linear"),
        Rule("int8_row", layers=("*.ff.*",), op="linear"),
        Rule("fp8_row", layers=("*blocks.0.attn1.to_q",), op="linear"),
        Rule("sdpa"),
    )
    handle = sage_plugin.patch(model.module, policy=Policy(1, rules), min_seq=0)
    model.run()
    report = handle.report()
    ran = {row.layer.removeprefix("transformer.transformer_blocks."): row for row in report.linears}
    assert {name: (row.kernel, row.rules) for name, row in ran.items()} == {
        "0.attn1.to_q": ("fp8_row", {3: 1}),
        "0.ff.net.0.proj": ("int8_row", {2: 1}),
        "1.ff.net.0.proj": ("int8_row", {2: 1}),
    }
    left = report.linears_left
    assert left["transformer.transformer_blocks.1.ff.net.2"].startswith("the policy's rule 1")
    assert left["transformer.transformer_blocks.1.attn1.to_q"] == "no rule of the policy takes it"
    assert report.idle_rules == ("rule 1 (bf16 on *ff.net.2)",)
    sage_plugin.patch(model.module, policy=Policy(1, rules), linears="int8_row", min_seq=0)
    assert len(handle.report().linears) == 10


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("sage", op="linear"), "kernel 'sage' of linear; choose one of auto, bf16"),
        (Rule("fp8_row"), "fp8_row"),
        (Rule("fp8_row", steps=":2", op="linear"), "a linear has one weight for all steps"),
        (Rule("fp8_row", op="norm"), "op is 'norm'; choose one of attention, linear"),
        (Rule("fp8_row", layers=("*norm1.linear",), op="linear"), "rule 1 of the policy names no"),
    ],
)
def test_rules_that_mean_nothing_are_refused(rule, message):
    with pytest.raises((ConfigError, UnknownKernelError), match=message.replace("*", r"\*")):
        sage_plugin.patch(tiny("cogx").module, policy=Policy(1, (rule,)))


def test_a_second_patch_changes_linears_in_place():
    model, handle = patched_cogx()
    plain = tiny("cogx").run()
    assert sage_plugin.patch(model.module, kernel="sdpa", linears="fp8_row") is handle
    assert {row.kernel for row in handle.report().linears} == {"fp8_row"}
    with sage_plugin.patched(model.module, kernel="sdpa", min_seq=0):
        assert torch.equal(model.run(), plain)
    model.run()
    assert {row.kernel: row.calls for row in handle.report().linears} == {
        "fp8_row": {"fp8_row:emulation+gelu_tanh": 1}
    }
    with pytest.raises(UnknownKernelError, match="linears is 'sage'; choose one of auto, "):
        sage_plugin.patch(model.module, linears="sage")
    assert len(handle.report().linears) == 12


def test_auto_leaves_linears_on_a_cpu():
    model, handle = patched_cogx(linears="auto")
    assert torch.equal(model.run(), tiny("cogx").run())
    assert {row.kernel for row in handle.report().linears} == {None}
    reasons = {reason for row in handle.report().linears for reason in row.fallbacks}
    assert reasons == {FallbackReason(Fallback.LINEAR_ON_CPU)}


def test_the_report_tells_linears_by_role():
    model, handle = patched_cogx()
    model.run()
    assert handle.report().text().splitlines()[3:] == [
        "21 linears: 12 on int8_row; their weights take 0.0 MiB more of their device",
        "  attention inputs: 6 linears; int8_row:emulation x6; 0.0 MiB more",
        "  attention outputs: 2 linears; int8_row:emulation x2; 0.0 MiB more",
        "  feed-forward inputs: 2 linears; int8_row:emulation x2; 0.0 MiB more",
        "  feed-forward outputs: 2 linears; int8_row:emulation+gelu_tanh x2; 0.0 MiB more",
        "  left: 3, embedders stay in 16 bit",
        "  left: 5, modulation and linears of norms stay in 16 bit",
        "  left: 1, projections into and out of the blocks stay in 16 bit",
    ]


@pytest.mark.usefixtures("_originals")
@pytest.mark.parametrize("way", ["weight_norm", "pruned", "spectral"])
@pytest.mark.parametrize("asked", ["patched", "refreshed"])
def test_a_weight_that_is_computed_from_now_on_is_left_alone(way, asked):
    def change(module):
        if way == "pruned":
            prune.l1_unstructured(module, "weight", amount=0.5)
        elif way == "spectral":
            torch.manual_seed(1)
            nn.utils.parametrizations.spectral_norm(module)
        else:
            nn.utils.parametrizations.weight_norm(module)

    plain = tiny("cogx")
    change(query_of(plain))
    model, handle = patched_cogx()
    first = model.run()
    change(query_of(model))
    if asked == "refreshed":
        sage_plugin.refresh(model.module)
    x = torch.randn(3, 5, 32)
    with torch.no_grad():
        torch.testing.assert_close(query_of(model)(x), query_of(plain)(x), rtol=0, atol=0)
    assert not torch.equal(model.run(), first) or way == "weight_norm"
    assert re.search("computed|not torch's own", handle.report().linears_left[QUERY])
    handle.unpatch()
    assert torch.equal(model.run(), plain.run())
    torch.testing.assert_close(query_of(model).weight, query_of(plain).weight, rtol=0, atol=0)
