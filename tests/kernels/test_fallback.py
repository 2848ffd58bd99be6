"""The Hopper variant where Gluon cannot build it: the portable one runs, and says so once."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import sage_plugin
from sage_plugin import device
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention import dispatch, launch_space, recipes
from sage_plugin.kernels.attention.backends.hopper.with_fallback import HopperOrPortable
from sage_plugin.kernels.attention.backends.triton.launch import QuantizedPortable
from sage_plugin.kernels.attention.launch_space import default_config
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams, Decision
from sage_plugin.kernels.support import FP8_KERNELS
from sage_plugin.schema import LaunchConfig
from tests.kernels.calls import HOPPER, Shape, draw, hopper_launch
from tests.registry.samples import FACTS

FAILURES = {
    "ImportError": ImportError("cannot import name 'warpgroup_mma'"),
    "RuntimeError": RuntimeError("PassManager::run failed"),
    "NoCompiler": RuntimeError("Failed to find C compiler"),
}
SHAPE = Shape(1, 4, 2, 30, 140, 64)


def problem_of(**parts):
    """A call with some parts."""
    return AttentionParams(**{"scale": 0.125, "causal": False, "layout": "bhsd"} | parts)


class Failing:
    """A Hopper variant whose launch raises, and counts."""

    def __init__(self, error):
        self.error, self.calls = error, 0

    def launch(self, *_, **__):
        self.calls += 1
        raise self.error


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.WARNING, "sage_plugin")
    return lambda: [record.getMessage() for record in caplog.records]


def variant(kernel, error, monkeypatch):
    """A fresh variant whose Gluon part fails, and that part."""
    built = HopperOrPortable(kernel, implementation(kernel, "portable").recipe)
    failing = Failing(error)
    monkeypatch.setattr(built, "first_choice", failing, raising=False)
    return built, failing


def portable_config(kernel, config, dim=64) -> LaunchConfig:
    """What the portable variant runs by, on operands of another config's blocks."""
    own = default_config(kernel, "sm_90", dim)
    same = ("block_n", "smooth_k", "smooth_v", "hadamard", "q_granule")
    return own.replaced(**{name: getattr(config, name) for name in same})


CONFIGS = {
    "default": {},
    "small blocks": {"block_m": 128, "block_n": 64},
    "exact weights": {"exp_linear": 0, "pv_flush": 0},
    "rotated": {"hadamard": 64, "q_granule": 16},
    "rough": {"smooth_k": False, "smooth_v": False},
}
PROBLEMS = {
    "plain": {},
    "causal": {"causal": True},
    "padding": {"mask": torch.arange(140).view(1, 1, 1, 140) < 100},
    "bias": {"mask": torch.linspace(-2, 2, 140).view(1, 1, 1, 140), "causal": True},
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("kernel", "parts", "fields"),
    [
        *(
            (HOPPER[at % len(HOPPER)], parts, "default")
            for at, parts in enumerate((*PROBLEMS, "causal"))
        ),
        *(("fav3_sage", "causal", fields) for fields in CONFIGS if fields != "default"),
    ],
)
def test_the_portable_variant_computes_what_gluon_cannot_build(kernel, parts, fields, monkeypatch):
    q, k, v = draw(SHAPE, torch.bfloat16)
    problem = problem_of(**PROBLEMS[parts])
    config = hopper_launch(**CONFIGS[fields])
    built, failing = variant(kernel, FAILURES["RuntimeError"], monkeypatch)
    operands = built.prepare(q, k, v, problem=problem, launch=config)
    out, lse = built.launch(operands, return_lse=True)
    assert failing.calls == 1
    portable = implementation(kernel, "portable")
    own = portable_config(kernel, config)
    theirs = portable.prepare(q, k, v, problem=problem, launch=own)
    expected, expected_lse = portable.launch(theirs, return_lse=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    assert operands.launch_config == config


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dim", [33, 80, 128])
def test_every_head_dim_of_the_hopper_variant_has_a_portable_config(dim, monkeypatch):
    q, k, v = draw(Shape(1, 1, 1, 20, 130, dim), torch.float16)
    problem = problem_of()
    built, _ = variant("fav3_fp8", FAILURES["RuntimeError"], monkeypatch)
    operands = built.prepare(q, k, v, problem=problem, launch=hopper_launch())
    out, lse = built.launch(operands, out_dtype=torch.float32)
    assert lse is None
    config = portable_config("fav3_fp8", hopper_launch(), dim)
    portable = implementation("fav3_fp8", "portable")
    theirs = portable.prepare(q, k, v, problem=problem, launch=config)
    assert torch.equal(out, portable.launch(theirs, out_dtype=torch.float32)[0])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", FAILURES)
def test_one_warning_and_no_second_try(name, monkeypatch, warnings):
    q, k, v = draw(SHAPE, torch.float16)
    built, failing = variant("fav3_sage", FAILURES[name], monkeypatch)
    operands = built.prepare(q, k, v, problem=problem_of(), launch=hopper_launch())
    first, _ = built.launch(operands)
    second, _ = built.launch(operands)
    assert failing.calls == 1
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
    (text,) = warnings()
    assert text.startswith("fav3_sage runs on its portable variant, since the kernel cannot be ")
    assert str(FAILURES[name]) in text
    assert str(built.reason) in text


@pytest.mark.usefixtures("interpreted")
def test_gluon_that_cannot_be_imported_is_a_build_failure_too(monkeypatch, warnings):
    """The import is at the first launch, so that a plan and a look-up need no Gluon."""
    stock, tried = importlib.import_module, []

    def module(name):
        if not name.endswith(".hopper.launch"):
            return stock(name)
        tried.append(name)
        raise ImportError("No module named 'triton.experimental'")

    monkeypatch.setattr(importlib, "import_module", module)
    built = HopperOrPortable("fav3_sage", implementation("fav3_sage", "portable").recipe)
    q, k, v = draw(SHAPE, torch.float16)
    operands = built.prepare(q, k, v, problem=problem_of(), launch=hopper_launch())
    assert tried == []
    outs = [built.launch(operands)[0] for _ in range(2)]
    assert torch.equal(*outs)
    assert tried == ["sage_plugin.kernels.attention.backends.hopper.launch"]
    assert len(warnings()) == 1
    assert "No module named 'triton.experimental'" in str(built.reason)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        ValueError("wrong"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_fails_while_it_runs_is_raised(error, monkeypatch, warnings):
    q, k, v = draw(SHAPE, torch.float16)
    built, failing = variant("fav3_sage", error, monkeypatch)
    operands = built.prepare(q, k, v, problem=problem_of(), launch=hopper_launch())
    for calls in (1, 2):
        with pytest.raises(type(error)) as raised:
            built.launch(operands)
        assert raised.value is error
        assert failing.calls == calls
    assert built.reason is None
    assert warnings() == []


def test_a_variant_that_runs_is_not_in_the_way_of_its_results(monkeypatch, warnings):
    operands = SimpleNamespace(problem=problem_of())
    built = HopperOrPortable("fav3_sage", implementation("fav3_sage", "portable").recipe)
    answer = (torch.ones(1), None)
    seen = []

    class Working:
        def launch(self, operands, **options):
            seen.append((operands, options))
            return answer

    monkeypatch.setattr(built, "first_choice", Working(), raising=False)
    assert built.launch(operands, out_dtype=torch.float16, return_lse=True) is answer
    assert seen == [(operands, {"out_dtype": torch.float16, "return_lse": True})]
    assert warnings() == []


@dataclass
class Operands:
    problem: AttentionParams
    launch_config: LaunchConfig
    head_dim: int = 64


def test_a_config_that_cannot_be_built_keeps_no_other_one_from_it(monkeypatch):
    built, failing = variant("fav3_sage", FAILURES["RuntimeError"], monkeypatch)
    monkeypatch.setattr(QuantizedPortable, "launch", lambda self, operands, **_: operands)
    tried = []
    for block_m, dim in [(128, 64), (128, 64), (192, 64), (128, 64), (128, 128), (192, 64)]:
        operands = Operands(problem_of(), hopper_launch(block_m=block_m), dim)
        assert built.launch(operands).launch_config == portable_config(
            "fav3_sage", operands.launch_config, dim
        )
        tried.append(failing.calls)
    assert tried == [1, 1, 2, 2, 3, 3]


# -- what the Hopper variant refuses -----------------------------------------------------------

CU = torch.tensor([0, 100, 140], dtype=torch.int32)
SPECIAL = {
    "window": {"window": (8, -1)},
    "cap": {"softcap": 5.0},
    "sinks": {"sinks": torch.zeros(4)},
    "mask of rows": {"mask": torch.ones(1, 1, 30, 140, dtype=torch.bool)},
    "bias of heads": {"mask": torch.zeros(1, 4, 1, 140)},
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kernel", HOPPER)
@pytest.mark.parametrize("parts", SPECIAL.values(), ids=SPECIAL)
def test_a_special_problem_that_nobody_decided_runs_on_the_portable_variant(kernel, parts):
    """A tuner knows the shape of a call and not the heads of its mask."""
    problem = problem_of(**parts)
    q, k, v = draw(SHAPE, torch.float16)
    found = []
    for variant in ("hopper", "portable"):
        built, given = implementation(kernel, variant), hopper_launch()
        if variant == "portable":
            given = default_config(kernel, "sm_90", 64).replaced(
                block_n=given.block_n, smooth_v=given.smooth_v
            )
        ops = built.prepare(q, k, v, problem=problem, launch=given)
        found.append(built.launch(ops, return_lse=True))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("parts", PROBLEMS.values(), ids=PROBLEMS)
def test_other_problems_are_prepared_as_the_portable_variant_does(parts):
    problem = problem_of(**parts)
    tensors, config = draw(SHAPE, torch.float16), hopper_launch()
    made, portable = (
        implementation("fav3_sage", name).prepare(*tensors, problem=problem, launch=config)
        for name in ("hopper", "portable")
    )
    for field in dataclasses.fields(made):
        one, other = getattr(made, field.name), getattr(portable, field.name)
        if isinstance(one, torch.Tensor):
            assert torch.equal(*(t.view(torch.uint8) for t in (one, other))), field.name


# -- on a device that has it -------------------------------------------------------------------


@pytest.fixture
def on_an_h100(monkeypatch, unconfigured):
    """CPU tensors that are taken for an H100's, whose Gluon cannot build."""
    for module in (dispatch, device):
        monkeypatch.setattr(module, "facts_of", lambda *_: FACTS)
    monkeypatch.setattr(device, "triton_version", lambda: "3.6.0")
    implementation.cache_clear()
    failing = Failing(FAILURES["RuntimeError"])
    monkeypatch.setattr(HopperOrPortable, "first_choice", failing)
    yield failing
    implementation.cache_clear()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kernel", FP8_KERNELS)
def test_a_call_by_name_or_auto_runs_whatever_gluon_does(kernel, on_an_h100, warnings):
    q, k, v = draw(SHAPE, torch.float16)
    out = sage_plugin.attention(q, k, v, kernel=kernel)
    assert on_an_h100.calls == 1
    again = sage_plugin.attention(q, k, v, kernel=kernel, variant="hopper")
    prepared = sage_plugin.prepare(q, k, v, kernel=kernel)
    assert prepared.decision == Decision(kernel, "hopper")
    assert on_an_h100.calls == 1
    assert torch.equal(out, again)
    assert torch.equal(out, sage_plugin.launch(prepared))
    config = portable_config(kernel, default_config(kernel, "sm_90", 64, variant="hopper"))
    by_name = sage_plugin.attention(q, k, v, kernel=kernel, variant="portable", launch=config)
    assert torch.equal(out, by_name)
    assert [text for text in warnings() if "runs on its portable variant" in text] == [
        f"{kernel} runs on its portable variant, since the kernel cannot be built here "
        "(RuntimeError: PassManager::run failed)"
    ]


SPECIAL_CALLS = {
    "window": {"window": (8, 8)},
    "cap": {"softcap": 5.0},
    "sinks": {"sinks": torch.zeros(4)},
    "bias of heads": {"attn_mask": torch.zeros(1, 4, 1, 140)},
    "mask of rows": {"attn_mask": torch.ones(30, 140, dtype=torch.bool)},
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("options", SPECIAL_CALLS.values(), ids=SPECIAL_CALLS)
def test_special_calls_go_to_the_portable_variant_and_a_named_one_is_refused(options, on_an_h100):
    q, k, v = draw(SHAPE, torch.float16)
    out = sage_plugin.attention(q, k, v, kernel="fav3_sage", **options)
    named = sage_plugin.attention(q, k, v, kernel="fav3_sage", variant="portable", **options)
    assert torch.equal(out, named)
    assert on_an_h100.calls == 0
    decision = sage_plugin.prepare(q, k, v, kernel="fav3_sage", **options).decision
    assert decision == Decision("fav3_sage", "portable")
    rows = options.get("attn_mask") is not None and options["attn_mask"].dim() == 2
    words = "takes no mask of rows and keys" if rows else "takes no window, cap, sinks, packed"
    for call in (sage_plugin.attention, sage_plugin.prepare):
        with pytest.raises(UnsupportedInputError, match=f"the Hopper variant {words}"):
            call(q, k, v, kernel="fav3_sage", variant="hopper", **options)


@pytest.mark.usefixtures("interpreted")
def test_packed_sequences_go_to_the_portable_variant(on_an_h100):
    q, k, v = (x[0].transpose(0, 1) for x in draw(Shape(1, 2, 2, 140, 140, 64), torch.float16))
    options = {"kernel": "fav3_sage"}
    out = sage_plugin.attention_varlen(q, k, v, CU, CU, 100, 100, **options)
    assert on_an_h100.calls == 0
    assert torch.isfinite(out).all()
    with pytest.raises(UnsupportedInputError, match="takes no window, cap, sinks, packed"):
        sage_plugin.attention_varlen(q, k, v, CU, CU, 100, 100, variant="hopper", **options)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kernel", FP8_KERNELS)
def test_the_config_of_a_call_is_that_of_its_variant(kernel, on_an_h100):
    q, k, v = draw(SHAPE, torch.float16)
    prepared = sage_plugin.prepare(q, k, v, kernel=kernel)
    assert prepared.operands.launch_config.block_m in launch_space.HOPPER_ROWS
    special = sage_plugin.prepare(q, k, v, kernel=kernel, softcap=3.0)
    assert special.operands.launch_config.block_m == 64
    with pytest.raises(UnsupportedInputError, match="cannot run here: block_m 64 is not 128"):
        sage_plugin.attention(q, k, v, kernel=kernel, launch=special.operands.launch_config)
    assert isinstance(recipes.built(prepared.decision, FACTS), HopperOrPortable)
