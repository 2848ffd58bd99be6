"""The report: whose counts, which words."""

from __future__ import annotations

import copy
import dataclasses

import pytest
from torch import nn

import sage_plugin
from sage_plugin import device, files
from sage_plugin.errors import PatchError
from sage_plugin.kernels import launch_config
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.attention.call import shape_of
from sage_plugin.kernels.contract import Decision
from sage_plugin.plugin.patch import patch, patched, unpatch
from sage_plugin.registry import store
from tests.plugin.toys import Direct, ThreeCalls, ToyAttention, qkv
from tests.registry import samples


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
    assert lines[0].split() == ["layer", "calls", "on", "a", "kernel", "how"]
    row = "model.a      2            1  sage:emulation x1; config default x1; host x1: "
    assert lines[1].startswith(row)
    assert "dropout" in lines[1]
    assert lines[2].startswith("1 of 2 calls ran on a kernel")
    assert lines[3] == "not patched: model.b (left out by include or exclude)"
    assert len(lines) == 4


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
    assert "saved 6.0 ms" in report.text()
    assert "about 6.0 ms saved over the host's attention in 3 of them" in report.text()


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
    assert lines() == [line, line.replace("3 on sage:emulation", "3 on host")]
