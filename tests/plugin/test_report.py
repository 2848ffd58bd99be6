"""The report: whose counts, which words."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

import sage_plugin
from sage_plugin import device, files
from sage_plugin.errors import PatchError, UnknownKernelError
from sage_plugin.kernels import launch_config
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.attention.call import shape_of
from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin import report_text
from sage_plugin.plugin.patch import patch, patched, unpatch
from sage_plugin.plugin.report import LayerReport, PluginReport
from sage_plugin.registry import store
from tests.plugin.tiny import tiny
from tests.plugin.toys import Direct, ThreeCalls, ToyAttention, qkv
from tests.registry import samples

SHORT = FallbackReason(Fallback.SHORTER_THAN_MIN_SEQ, 1024)
BY_RULE = FallbackReason(Fallback.POLICY, 1)


def test_counts_are_per_layer_and_survive_unpatch():
    model = nn.ModuleDict({"a": ToyAttention(Direct()), "b": ToyAttention(ThreeCalls())})
    handle = patch(model, kernel="sage", min_seq=0)
    q, k, v = qkv()
    model["a"](q, k, v)
    model["b"](q, k, v)
    model["b"](q, k, v, dropout_p=0.1)
    report = sage_plugin.report(model)
    first, second = report.rows
    assert (first.layer, first.calls, first.fallbacks) == ("model.a", {"sage:emulation": 1}, {})
    assert (second.layer, second.calls) == ("model.b", {"sage:emulation": 3})
    assert list(second.fallbacks.values()) == [3]
    assert second.config_sources == {"default": 3}
    assert (report.total_calls(), report.kernel_calls()) == (7, 4)
    unpatch(model)
    assert handle.report() == report
    with pytest.raises(PatchError, match=r"ModuleDict is not patched.*patch\(\)"):
        sage_plugin.report(model)


def test_report_124_the_text_says_what_ran_where():
    model = nn.ModuleDict({"a": ToyAttention(Direct()), "b": ToyAttention(Direct())})
    with patched(model, kernel="sage", min_seq=0, exclude="b") as handle:
        model["a"](*qkv())
        model["a"](*qkv(), dropout_p=0.1)
        model["b"](*qkv())
        lines = handle.report().text().splitlines()
    assert lines == [
        "1 of 2 calls ran on a kernel (50 %); calls in graphs are not counted",
        "model.a",
        "  1 of 2 on a kernel; sage:emulation x1; config default x1; fallback x1: dropout",
        "    is not supported",
        "not patched: model.b (left out by include or exclude)",
    ]


@pytest.mark.usefixtures("unconfigured")
@pytest.mark.parametrize("no_speeds", [(), launch_config.NO_SPEEDS])
def test_what_calls_saved_is_what_their_configs_were_tuned_with(no_speeds, tmp_path, monkeypatch):
    monkeypatch.setattr(launch_config, "NO_SPEEDS", no_speeds)
    q, k, v = qkv()
    shape = shape_of(q, k, v, causal=False, scale=1.0, layout="bhsd")
    of = dispatch.call_key(shape, Decision("sage", "emulation"))
    cpu = device.facts("cpu")
    twice = dataclasses.replace(of, seq_q=2 * of.seq_q, seq_k=2 * of.seq_k)
    times = samples.evidence(time=samples.timing(3.0), host_time=samples.timing(11.0))
    entry = samples.entry(
        twice, dispatch.default_launch(of, cpu), because=times,
        seq_q_range=(of.seq_q, twice.seq_q), seq_k_range=(of.seq_k, twice.seq_k),
    )  # fmt: skip
    path = tmp_path / cpu.slug / "attention.json"
    path.parent.mkdir()
    files.write_atomically(path, store.text_of(samples.file(entry, facts=cpu)))
    layer = ToyAttention(Direct())
    with patched(layer, kernel="sage", min_seq=0, config_dir=tmp_path) as handle:
        for _ in range(3):
            layer(q, k, v)
        layer(q, k, v, dropout_p=0.1)
    report = handle.report()
    (row,) = report.rows
    assert row.config_sources == {"near": 3}
    if no_speeds:  # an emulation's times are none
        assert (row.timed_calls, row.saved_ms) == (0, 0.0)
        assert "saved" not in report.text()
        return
    assert (row.timed_calls, row.saved_ms, report.saved_ms()) == (3, 6.0, 6.0)
    lines = report.text().splitlines()
    assert lines[:3] == [
        "about 1.5 ms saved over the baseline per forward,",
        "  by the times that tuning took of 3 of the 3 kernel calls",
        "3 of 4 calls ran on a kernel (75 %); calls in graphs are not counted",
    ]
    assert "saved 6.0 ms" in report.text()


@pytest.mark.usefixtures("unconfigured")
def test_nothing_is_said_of_times_that_nobody_took():
    layer = ToyAttention(Direct())
    with patched(layer, kernel="sage", min_seq=0) as handle:
        layer(*qkv())
    assert handle.report().rows[0].timed_calls == 0
    assert "saved" not in handle.report().text()


def test_a_new_patch_starts_new_counts():
    layer = ToyAttention(Direct())
    with patched(layer, kernel="sage", min_seq=0) as first:
        layer(*qkv())
    with patched(layer, kernel="sage", min_seq=0) as second:
        assert second.report().total_calls() == 0
    assert first.report().total_calls() == 1


def row(layer, **counts):
    made = {"calls": {"fav2:hopper": 2}, "fallbacks": {}, "config_sources": {}, **counts}
    return LayerReport(layer, **made)


def report_with(*rows, **more):
    return PluginReport(rows, more.pop("skipped", {}), more.pop("lost", ()), **more)


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([row(f"t.blocks.{i}.attn1") for i in range(30)], ["t.blocks.*.attn1, 30 layers"]),
        (
            [row(f"t.blocks.{i}.attn{j}") for i in range(3) for j in (1, 2)],
            ["t.blocks.*.attn1, 3 layers", "t.blocks.*.attn2, 3 layers"],
        ),
        (
            [row("t.b.0.a", calls={"sage:hopper": 2}), *(row(f"t.b.{i}.a") for i in range(1, 9))],
            ["t.b.0.a", "t.b.1-8.a, 8 layers"],
        ),
        (
            [row(f"t.b.{i}.a", calls={"sage:hopper": 1 + i % 2}) for i in range(9)],
            ["t.b.*.a, 5 layers", "t.b.*.a, 4 layers"],
        ),
        (
            [row(f"u.d.{i}.x.{j}.attn1") for i in (1, 2) for j in (0, 1)] + [row("u.mid.attn1")],
            ["u.d.*.x.*.attn1, 4 layers", "u.mid.attn1"],
        ),
        ([row("t.a", rules={1: 2}), row("t.b", rules={2: 2})], ["t.a", "t.b"]),
        (
            [row(f"t.{i}.a", rules={1: 2}, rule_steps={1: (i // 2,)}) for i in range(4)],
            ["t.0-1.a, 2 layers", "t.2-3.a, 2 layers"],
        ),
    ],
)
def test_report_407_equal_layers_are_one_row(rows, names):
    assert [name for name, _ in report_text.grouped(rows)] == names
    text = report_with(*rows).text().splitlines()
    assert [line for line in text[1:] if not line.startswith("  ")] == names
    every = report_with(*rows).text(every_layer=True).splitlines()
    assert [x for x in every[1:] if not x.startswith("  ")] == [one.layer for one in rows]


def test_report_407_sums_of_a_group():
    rows = [
        row(
            f"t.blocks.{i}.attn", calls={"fav2:hopper": 4, "sage:hopper": 1},
            fallbacks={SHORT: 5, BY_RULE: 2},
            config_sources={"exact": 1, "exact, stale": 3, "default": 1},
            saved_ms=2.5, timed_calls=4, rules={1: 2, 3: 6}, rule_steps={1: (0, 1), 3: (2, 4)},
        )
        for i in range(10)
    ]  # fmt: skip
    text = report_with(*rows, forwards=20, steps=10, idle_rules=("rule 2 (sage on *)",)).text()
    assert text.splitlines() == [
        "about 2.5 ms saved over the baseline per step,",
        "  by the times that tuning took of 40 of the 50 kernel calls",
        "50 of 120 calls ran on a kernel (42 %); calls in graphs are not counted",
        "10 calls ran on default configs, which",
        "  `sage capture SCRIPT.py && sage tune captured_inputs` tunes",
        "30 calls ran on configs that were tuned with other software, which",
        "  `sage configs revalidate` measures again",
        "t.blocks.*.attn, 10 layers",
        "  50 of 120 on a kernel; fav2:hopper x40; sage:hopper x10; config exact x10;",
        "    config exact, stale x30; config default x10; rule 1 x20 at steps 0-1 (not on",
        "    a kernel); rule 3 x60 at steps 2, 4; saved 25.0 ms; fallback x50: shorter",
        "    than min_seq 1024",
        "never met: rule 2 (sage on *)",
    ]


@pytest.mark.parametrize(
    ("fallbacks", "told"),
    [
        ({SHORT: 5, BY_RULE: 2}, "  most often: shorter than min_seq 1024; patch(..., min_seq=0)"),
        ({SHORT: 2, BY_RULE: 5}, f"  most often: {BY_RULE}"),
    ],
)
def test_where_nothing_ran_the_first_reason_is_on_top(fallbacks, told):
    first, second, *_ = report_with(row("a", calls={}, fallbacks=fallbacks)).text().splitlines()
    assert first.startswith("0 of 7 calls ran on a kernel (0 %)")
    assert second.startswith(told)
    ran = report_with(row("a", calls={"sage:hopper": 1}, fallbacks=fallbacks))
    assert "most often" not in ran.text()


def test_what_is_lost_is_said():
    lines = report_with(row("a", saved_ms=-3.0, timed_calls=2), forwards=2).text().splitlines()
    assert lines[0] == "about 1.5 ms lost against the baseline per forward,"


def test_report_407_any_model_fits_a_screen():
    """More groups than fit are summed up, and lists of layers are one line each."""
    rows = [
        row(f"unet.down_blocks.{i}.attentions.{j}.transformer_blocks.{k}.attn1",
            calls={"fav2:hopper": 1 + i * 10 + j}, config_sources={"exact": 1 + i * 10 + j})
        for i in range(4) for j in range(4) for k in range(4)
    ]  # fmt: skip
    skipped = {f"unet.up_blocks.{i}.attn": "left out by include or exclude" for i in range(30)}
    lost = tuple(f"unet.x.{i}.attn" for i in range(20))
    lines = report_with(*rows, skipped=skipped, lost=lost).text().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "and 40 more layers; text(every_layer=True) shows all" in lines
    assert "not patched: unet.up_blocks.0-29.attn, 30 layers (left out by include or" in lines
    assert any("unet.x.0-19.attn, 20 layers" in line for line in lines)


def test_report_408_a_second_patch_counts_anew(monkeypatch):
    layer = ToyAttention(Direct())
    handle = patch(layer, kernel="sage", min_seq=0)
    for _ in range(3):
        layer(*qkv())
    with patched(layer, kernel="fav2", min_seq=0) as inner:
        layer(*qkv())
        layer(*qkv(), dropout_p=0.1)
        (seen,) = inner.report().rows
        assert (seen.calls, list(seen.fallbacks.values())) == ({"fav2:emulation": 1}, [1])
        assert inner.report().forwards == 2
        assert list(inner.layers) == ["model"]
    assert inner.report().rows == (seen,)
    assert inner.components == {}
    layer(*qkv())
    (seen,) = handle.report().rows
    assert (seen.calls, seen.fallbacks) == ({"sage:emulation": 4}, {})
    assert handle.report().forwards == 4
    with pytest.raises(UnknownKernelError):
        patch(layer, kernel="sag")
    assert handle.report().total_calls() == 4
    patch(layer, kernel="fav2", min_seq=0)
    assert (handle.report().total_calls(), handle.report().forwards) == (0, 0)
    layer(*qkv())
    assert handle.report().rows[0].calls == {"fav2:emulation": 1}
    unpatch(layer)


def test_report_406_a_reason_is_warned_of_once_a_process(caplog):
    """Each layer that has it is among the log's details."""
    caplog.set_level("DEBUG", "sage_plugin")
    model = nn.ModuleDict({"a": ToyAttention(Direct()), "b": ToyAttention(Direct())})
    for _ in range(3):
        with patched(model, kernel="sage", min_seq=10_000):
            for name in ("a", "b", "a"):
                model[name](*qkv())

    def told(level):
        found = [r for r in caplog.records if "min_seq 10000" in r.getMessage()]
        return [r.getMessage().partition(":")[0] for r in found if r.levelname == level]

    assert told("WARNING") == ["model.a"]
    assert told("DEBUG") == ["model.b", "model.a", "model.b", "model.a", "model.b"]
    with patched(model, kernel="sage", min_seq=20_000):
        model["b"](*qkv())
    assert sum(r.levelname == "WARNING" for r in caplog.records) == 2


def test_report_70_the_first_forward_of_a_patch_logs_one_line(caplog):
    model = ToyAttention(ThreeCalls())
    caplog.set_level("INFO", "sage_plugin")
    handle = patch(model, kernel="sage", min_seq=0)
    copied = copy.deepcopy(model)

    def lines():
        return [r.getMessage() for r in caplog.records if "first forward" in r.getMessage()]

    for _ in range(2):
        model(*qkv())
        copied(*qkv())
    line = "model: attention calls of the first forward: 3 on sage:emulation"
    assert lines() == [line]
    handle.unpatch()
    model(*qkv())
    patch(model, kernel="fav2", min_seq=1000)
    model(*qkv())
    last = line.replace("3 on sage:emulation", "3 on the model's own attention")
    assert lines() == [line, last]


def test_a_model_of_transformers_beside_a_denoiser_is_said_to_be_left_and_can_be_patched():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
        num_hidden_layers=2, vocab_size=32,
    )  # fmt: skip
    llm = transformers.LlamaModel(config).eval()
    both = nn.ModuleDict({"dit": tiny("wan").module, "llm": llm})
    handle = patch(both, kernel="sage", min_seq=0)
    left = [path for path in handle.report().skipped if ".llm." in path]
    assert left == [f"model.llm.layers.{i}.self_attn" for i in range(2)]
    own = patch(llm, kernel="sage", min_seq=0)
    with torch.no_grad():
        llm(input_ids=torch.arange(16)[None], use_cache=False)
    assert own.report().kernel_calls() == 2
