"""What each layer will run on, told before it runs, is what it then runs on."""

from __future__ import annotations

import dataclasses

import pytest

import sage_plugin
from sage_plugin.kernels.attention import dispatch
from sage_plugin.plugin.options.checked import checked_options
from sage_plugin.plugin.plan.model_calls import calls_of
from sage_plugin.plugin.plan.run_plan import NO_RULE, RunPlan, planned
from sage_plugin.plugin.policy.rules import Policy, Rule
from sage_plugin.registry import load
from tests.capture.toys import LAYERS, denoise, video_model
from tests.plugin.test_model_calls import COGVIDEOX, WAN

H200 = load.read(load.file_path(load.shipped_dir(), "nvidia-h200")).device


def options(**changes):
    plain = checked_options(min_seq=2)
    return dataclasses.replace(plain, **changes)


def rows_of(config, **changes):
    return [
        row
        for call in calls_of(config)
        for number in range(call.layers)
        for row in planned(f"t.blocks.{number}.{call.kind}", call.shape, options(**changes), H200)
    ]


def test_a_model_on_a_card_that_is_not_here():
    rows = rows_of(WAN)
    own, across = rows[0], rows[-1]
    assert own.kernel == "fav3_sage:hopper"
    assert own.found.source in ("exact", "near")
    assert own.saved_ms > 1
    assert (across.kernel, across.found) == ("", None)
    assert "so small a call" in across.reason
    plan = RunPlan(tuple(rows), H200.name)
    assert plan.saved_ms() == pytest.approx(30 * own.saved_ms)
    text = plan.text()
    assert text.splitlines()[0] == "plan for NVIDIA H200: 30 of 60 calls go to a kernel"
    assert f"about {30 * own.saved_ms:.1f} ms saved per forward, by the tuning of 30" in text
    assert "t.blocks.*.self, 30 layers: 1x12 heads of 128, 32,760 tokens, bf16 bshd" in text
    cross = "t.blocks.*.cross, 30 layers: 1x12 heads of 128, 32,760:512 tokens, bf16 bshd"
    assert cross in " ".join(text.split())
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_policy_has_a_row_for_each_rule_that_may_take_a_call():
    rules = (
        Rule("sdpa", steps=":2"),
        Rule("sage", layers=("*.1.*",), launch={"block_n": 64}),
        Rule("auto", layers=("*.2.*",), attention="cross"),
    )
    rows = rows_of(COGVIDEOX, policy=Policy(1, rules))
    seen = [(row.layer.split(".")[2], row.steps, row.kernel, row.reason) for row in rows[:6]]
    assert seen == [
        ("0", ":2", "", "sdpa is asked for"),
        ("0", "", "", NO_RULE),
        ("1", ":2", "", "sdpa is asked for"),
        ("1", "", "sage:portable", ""),
        ("2", ":2", "", "sdpa is asked for"),
        ("2", "", "", NO_RULE),
    ]
    assert (rows[3].found.source, rows[3].found.config.block_n) == ("policy", 64)
    text = RunPlan(tuple(rows), "x").text()
    assert "at steps :2: the library's own attention: sdpa is asked for" in text
    assert "saved per forward" not in text, "which depends on the steps"


def test_a_handle_tells_what_then_happens():
    dispatch.forget()
    model = video_model()
    with sage_plugin.patch(model, kernel="sage", min_seq=0) as handle:
        plan = handle.report(plan=True)
        assert [row.shape.seq_q for row in plan.rows] == [40] * LAYERS
        denoise(model, steps=1)
        ran = handle.report()
    for row, planned_row in zip(ran.rows, plan.rows, strict=True):
        assert row.layer == planned_row.layer
        assert row.calls == {planned_row.kernel: 1}
        assert row.config_sources == {planned_row.found.mark: 1}


def test_what_no_configuration_tells_is_said():
    model = video_model()
    model.register_to_config(num_layers=0)
    with sage_plugin.patch(model, kernel="sage") as handle:
        plan = handle.report(plan=True)
    assert {row.shape for row in plan.rows} == {None}
    assert "no usable num_layers" in plan.rows[0].reason
    assert "shapes not known before a run" in plan.text()
