"""Rotation and smoothing of patched linears: asked for by `patch` or by rules of a policy."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

pytest.importorskip("diffusers")

import sage_plugin
from sage_plugin.errors import ConfigError, UsageError
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.linear import quantizer
from sage_plugin.kernels.linear.weight import quantize_weight
from sage_plugin.plugin.linears.smoothing import HEADER, read
from sage_plugin.plugin.policy.rules import Policy, Rule
from sage_plugin.tune.policy.smoothing import write
from tests.plugin.tiny import tiny

CHANNELS = 32
BLOCK = "transformer.transformer_blocks.0"
INSIDE = ("to_q", "to_k", "to_v")
LINEARS = (
    *(f"{BLOCK}.attn1.{name}" for name in (*INSIDE, "to_out.0")),
    f"{BLOCK}.ff.net.0.proj", f"{BLOCK}.ff.net.2",
)  # fmt: skip
PATCH = {"kernel": "sdpa", "linears": "int8_row", "min_seq": 0}


@pytest.fixture
def model():
    """A model whose attention reads a few channels that stick out."""
    made = tiny("cogx")
    with torch.no_grad():
        for block in made.module.transformer_blocks:
            block.norm1.norm.weight[3] = 40.0
    return made


def channels_of(model, layer: str) -> int:
    return model.module.get_submodule(layer.removeprefix("transformer.")).weight.shape[1]


@pytest.fixture
def factors(model, tmp_path):
    """A file of factors: of the first channels for the attention inputs, 1 for the others."""
    layers = [
        name.replace("blocks.0", f"blocks.{number}")
        for number in range(len(model.module.transformer_blocks))
        for name in LINEARS
    ]
    made = {layer: torch.ones(channels_of(model, layer)) for layer in layers}
    for layer in layers:
        if layer.endswith(INSIDE):
            made[layer][3] = 6.0
    write(tmp_path / "factors.safetensors", made)
    return tmp_path / "factors.safetensors"


@pytest.mark.parametrize(
    ("rotation", "smooth", "best"), [(0, False, 1.0), (32, False, 0.6), (0, True, 0.6)]
)
def test_a_linear_multiplies_what_its_options_say(model, factors, rotation, smooth, best):
    query = model.module.transformer_blocks[0].attn1.to_q
    weight, bias = query.weight.detach().clone(), query.bias.detach().clone()
    x = torch.randn(3, 5, CHANNELS)
    x[..., 3] *= 40.0
    exact = torch.nn.functional.linear(x, weight, bias)
    options = {"rotation": rotation, "smoothing": factors if smooth else None}
    with sage_plugin.patched(model.module, **PATCH, **options) as handle, torch.no_grad():
        out = query(x)
        report = handle.report()
    told = f"+rotation={rotation}" if rotation else ""
    label = f"int8_row{told}{'+smoothing=true' if smooth else ''}"
    assert {row.label for row in report.linears} == {label}
    assert {row.kernel for row in report.linears} == {"int8_row"}
    assert f"on {label};" in report.text()
    by = read(factors).of(f"{BLOCK}.attn1.to_q") if smooth else None
    rows = quantize_weight(weight, "int8_row", rotation=rotation, smooth=by)
    torch.testing.assert_close(out, sage_plugin.linear(x, rows, bias), rtol=0, atol=0)
    plain = sage_plugin.linear(x, quantize_weight(weight, "int8_row"), bias)
    assert (out - exact).norm() <= best * (plain - exact).norm()
    with torch.no_grad():
        assert torch.equal(query(x), exact)


def test_a_block_is_no_larger_than_what_divides_the_channels(model):
    with sage_plugin.patched(model.module, **PATCH, rotation=256) as handle:
        labels = {row.layer: row.label for row in handle.report().linears}
    assert labels[f"{BLOCK}.attn1.to_q"] == "int8_row+rotation=32"
    assert labels[f"{BLOCK}.ff.net.2"] == "int8_row+rotation=128"


@pytest.fixture
def passes(monkeypatch):
    """Sizes of what is quantized."""
    sizes = []
    real = quantizer.RowQuantizer.__call__

    def counted(self, x, *args, **kwargs):
        sizes.append(x.shape[-1])
        return real(self, x, *args, **kwargs)

    monkeypatch.setattr(quantizer.RowQuantizer, "__call__", counted)
    return sizes


def test_linears_that_read_one_tensor_share_its_quantization(model, factors, passes):
    def count():
        passes.clear()
        model.run()
        return len(passes)

    sage_plugin.patch(model.module, **PATCH)
    plain = count()
    sage_plugin.patch(model.module, **PATCH, rotation=32, smoothing=factors)
    assert count() == plain
    model.module.to("cpu")
    assert count() == plain


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("error::UserWarning")
def test_a_graph_has_both(model, factors):
    torch._dynamo.reset()
    sage_plugin.patch(model.module, **PATCH, rotation=32, smoothing=factors)
    eager, counter = model.run(), CompileCounter()
    out = model.run(torch.compile(model.module, backend=counter, fullgraph=True))
    torch._dynamo.reset()
    assert counter.frame_count == 1
    assert float((out - eager).norm() / eager.norm()) < 1e-3


def test_a_second_patch_quantizes_what_changed(model, factors):
    query = model.module.transformer_blocks[0].attn1.to_q
    sage_plugin.patch(model.module, **PATCH, smoothing=factors)
    first = vars(query)["_sage_linear"].quantized
    sage_plugin.patch(model.module, **PATCH, smoothing=str(factors))
    assert vars(query)["_sage_linear"].quantized is first
    sage_plugin.patch(model.module, **PATCH, rotation=16)
    assert vars(query)["_sage_linear"].quantized.label == "int8_row+rotation=16"
    sage_plugin.patch(model.module, **PATCH)
    assert vars(query)["_sage_linear"].quantized.label == "int8_row"


def test_rules_choose_layers_and_name_a_file_beside_the_policy(model, factors):
    rules = (
        Rule("int8_row", ("*attn1.to_?",), op="linear", smoothing=True),
        Rule("int8_row", ("*ff.*",), op="linear", rotation=64),
        Rule("fp8_row", op="linear"),
    )
    path = factors.parent / "policy.json"
    path.write_text(Policy(1, rules, smoothing=factors.name).text())
    with sage_plugin.patched(model.module, policy=path) as handle:
        report = handle.report()
        labels = {row.layer: row.label for row in report.linears}
    assert [labels[name] for name in LINEARS] == [
        *3 * ["int8_row+smoothing=true"], "fp8_row", "int8_row+rotation=32", "int8_row+rotation=64",
    ]  # fmt: skip
    assert "rule 2 (int8_row+rotation=64 on *ff.*)" in report.idle_rules


def test_a_layer_without_factors_is_refused_by_name_and_nothing_is_patched(model, factors):
    few = {name: torch.ones(channels_of(model, name)) for name in LINEARS[1:]}
    write(factors, few)
    with pytest.raises(ConfigError, match=r"no factors of transformer\.trans.*0\.attn1\.to_q: rec"):
        sage_plugin.patch(model.module, **PATCH, smoothing=factors)
    assert sage_plugin.plugin.patch.handle_of(model.module) is None
    write(factors, few | {LINEARS[0]: torch.ones(16)})
    with pytest.raises(ConfigError, match=r"16 factors of .*to_q, which has 32 input channels"):
        sage_plugin.patch(model.module, **PATCH, smoothing=factors)


def test_a_shard_of_the_channels_is_left_by_name(model, factors):
    first = model.module.transformer_blocks[0].attn1.to_q
    write(factors, {n: torch.ones(2 * c) for n in LINEARS if (c := channels_of(model, n))})
    globs = ("transformer_blocks.0.*",)
    handle = sage_plugin.patch(model.module, **PATCH, smoothing=factors, include=globs)
    reason = FallbackReason(Fallback.LINEAR_SMOOTHING, (32, 64))
    assert vars(first)["_sage_linear"].left == reason
    assert handle.report().linears_left[LINEARS[0]] == str(reason)


def test_a_component_may_be_called_otherwise_than_it_was_recorded(factors):
    smoothing = read(factors)
    assert torch.equal(smoothing.of("model.transformer_blocks.0.attn1.to_k")[2:5],
                       torch.tensor([1.0, 6.0, 1.0]))  # fmt: skip
    assert smoothing.of("model.transformer_blocks.0.attn1.to_x") is None


SMOOTHS = Policy(1, (Rule("int8_row", op="linear", smoothing=True),))
WRONG = (
    (UsageError, "rotation is 48; choose one of 0, 16", {"rotation": 48}),
    (UsageError, "rotation is True", {"rotation": True}),
    (UsageError, "rotation is 64 and linears is None", {"rotation": 64, "linears": None}),
    (UsageError, "smoothing is 3; it needs to be a path", {"smoothing": 3}),
    (UsageError, "neither linears nor a rule", {"smoothing": "x", "linears": None}),
    (ConfigError, "names no file of factors",
     {"kernel": "auto", "linears": None, "policy": SMOOTHS}),
)  # fmt: skip


@pytest.mark.parametrize(("error", "words", "options"), WRONG)
def test_what_can_mean_nothing_is_refused(model, error, words, options):
    with pytest.raises(error, match=words):
        sage_plugin.patch(model.module, **PATCH | options)


@pytest.mark.parametrize(
    "damage",
    ["no file", "text", "cut", "a model's", "another schema", "fp16", "zero", "two dimensions"],
)
def test_a_file_that_holds_something_else_is_refused(factors, damage):
    from safetensors.torch import save_file

    data, one = factors.read_bytes(), torch.ones(4)
    match damage:
        case "no file":
            factors.unlink()
        case "text":
            factors.write_text("{}")
        case "cut":
            factors.write_bytes(data[:-8])
        case "a model's":
            save_file({"a.b": one}, factors)
        case "another schema":
            save_file({"a.b": one}, factors, HEADER | {"schema_version": "9"})
        case "fp16":
            save_file({"a.b": one.half()}, factors, HEADER)
        case "zero":
            save_file({"a.b": 0 * one}, factors, HEADER)
        case "two dimensions":
            save_file({"a.b": one[None]}, factors, HEADER)
    with pytest.raises(ConfigError, match="factors") as caught:
        read(factors)
    assert "\n" not in str(caught.value)
