"""Policies: which rule decides a call at which step, eager and compiled, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers import DDIMScheduler
from torch._dynamo.testing import CompileCounter

import sage_plugin
from sage_plugin.errors import ConfigError, UnsupportedInputError, UsageError
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin import request as choice
from sage_plugin.plugin.policy import rules as policy
from sage_plugin.plugin.policy.rules import PRESETS, Policy, Rule
from tests.plugin.tiny import tiny

pytestmark = pytest.mark.usefixtures("no_graphs")
STEPS = 5

BY_FIRST_RULE = FallbackReason(Fallback.POLICY, 1)


class Loop:
    """A pipeline of one transformer or two, with one forward a step or two."""

    def __init__(self, name="wan", forwards=1, second_from=None):
        self.scheduler, self.forwards, self.second_from = DDIMScheduler(), forwards, second_from
        self.tiny = {"transformer": tiny(name)}
        if second_from is not None:
            self.tiny["transformer_2"] = tiny(name)
        self.components = {name: one.module for name, one in self.tiny.items()}
        self.components["scheduler"] = self.scheduler

    def __call__(self, module=None):
        """The outputs of every forward."""
        self.scheduler.set_timesteps(STEPS)
        made, x = [], torch.zeros(1, 4, 2, 2)
        for number, t in enumerate(self.scheduler.timesteps):
            late = self.second_from is not None and number >= self.second_from
            one = self.tiny["transformer_2" if late else "transformer"]
            made += [one.run(module) for _ in range(self.forwards)]
            x = self.scheduler.step(torch.zeros_like(x), t, x, return_dict=False)[0]
        return made


def rules(*given, **more):
    return Policy(1, tuple(given), **more)


def counts(handle):
    """Calls by layer: of kernels by label, then of the host by reason."""
    return {row.layer: (row.calls, row.fallbacks) for row in handle.report().rows}


# -- files -----------------------------------------------------------------------------------------


def write(path, text):
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def test_a_file_is_read_as_it_was_written(tmp_path):
    made = rules(
        Rule("sage", layers=("*attn1",), steps=":20%", attention="self", min_seq=1024,
             launch={"smooth_v": True}, saved_ms=12.5, error=0.03, captures=("sha256:aa",)),
        Rule("sdpa", steps="-1:"),
        Rule("auto"),
        model="WanTransformer3DModel", note="made by hand",
    )  # fmt: skip
    path = write(tmp_path / "policy.json", made.text())
    assert policy.is_policy(path)
    assert policy.chosen(path) == made
    assert policy.chosen(str(path)).text() == made.text()
    assert '"min_seq": 0' not in made.text()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sound_and_leave_cross_attention_and_short_calls(name):
    preset = policy.chosen(name)
    assert list(policy.problems(preset.rules)) == []
    for rule in preset.rules:
        kernels = rule.kernel != "sdpa"
        assert not (kernels and rule.fits(2000, 1999))
        assert not (kernels and rule.fits(1000, 1000))
        assert not kernels or rule.fits(1024, 1024)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{", "not valid JSON"),
        ('{"schema_version": 1, "rules": [{"kernel": "sage", "min_seq": NaN}]}', "NaN"),
        ([], "expected a JSON object"),
        ({"schema_version": 2, "rules": []}, "schema version 2; this release reads 1"),
        ({"rules": []}, "schema version None"),
        ({"schema_version": 1, "rules": []}, "no rules"),
        ({"schema_version": 1, "rules": [{"layers": ["*"]}]}, "'kernel' is missing"),
        ({"schema_version": 1, "rules": [{"kernel": "sage", "layer": "*"}]}, "unknown field"),
        ({"schema_version": 1, "rules": [{"kernel": "sage3"}]}, "rule 1: .*sage3"),
        ({"schema_version": 1, "rules": [{"kernel": "fav2:hoper"}]}, "rule 1: .*hoper"),
        ({"schema_version": 1, "rules": [{"kernel": "sage", "steps": "5"}]}, "rule 1: steps"),
        ({"schema_version": 1, "rules": [{"kernel": "sage", "layers": []}]}, "layers are empty"),
        ({"schema_version": 1, "rules": [{"kernel": "sage", "attention": "x"}]}, "attention is"),
        ({"schema_version": 1, "rules": [{"kernel": "sage", "min_seq": -1}]}, "min_seq is -1"),
        ({"schema_version": 1, "rules": [{"kernel": "sage", "launch": {"a": 1}}]}, "no field 'a'"),
        ({"schema_version": 1, "rules": [{"kernel": "sage", "launch": {"num_warps": "8"}}]},
         "rule 1: launch: .*num_warps: got '8'"),
        ({"schema_version": 1, "rules": [{"kernel": "sage", "layers": ["[" * 301]}]},
         "rule 1: layers has .* longer than 300 characters"),
        ({"schema_version": 1,
          "rules": [{"kernel": "sage", "layers": [f"{n}"]} for n in range(1001)]},
         "more than 1000 rules"),
        ({"schema_version": 1, "rules": [{"kernel": "auto", "launch": {"smooth_v": True}}]},
         "belongs to a kernel by name"),
        ({"schema_version": 1, "rules": [{"kernel": "sage", "rotation": 64}]},
         "rotation belongs to rules of linears that are quantized, .* with kernel 'sage'"),
        ({"schema_version": 1, "rules": [{"kernel": "bf16", "op": "linear", "smoothing": True}]},
         "smoothing belongs to rules of linears that are quantized"),
        ({"schema_version": 1, "rules": [{"kernel": "auto", "op": "linear", "rotation": 24}]},
         "rotation is 24; choose one of 0, 16, 32, 64, 128, 256"),
        ({"schema_version": 1, "rules": [{"kernel": "bf16", "op": "linears"}]},
         "op is 'linears'; choose one of attention, linear, grouped_linear, paged_attention"),
        ({"schema_version": 1, "rules": [{"kernel": "fp8_tensor", "op": "grouped_linear"}]},
         "kernel 'fp8_tensor' of grouped_linear; choose one of auto, bf16, fp8_row, int8_row"),
        ({"schema_version": 1, "rules": [{"kernel": "sage", "op": "paged_attention"}]},
         "kernel 'sage' of paged_attention; choose one of auto, fav2, qk_int8, qk_fp8"),
        ({"schema_version": 1, "rules": [{"kernel": "fav2", "op": "paged_attention",
                                          "steps": ":3"}]},
         "steps are ':3', and a server has no denoising steps; .*as they are \\(fav2\\)"),
        ({"schema_version": 1, "rules": [{"kernel": "fav2", "op": "paged_attention",
                                          "min_seq": 9}]},
         "min_seq belongs to rules of attention, and this one is of paged_attention"),
        ({"schema_version": 1, "rules": [{"kernel": "fp8_row", "op": "linear"},
                                         {"kernel": "bf16", "op": "grouped_linear"}]},
         "rule 2 never fits a call, since rule 1"),
        ({"schema_version": 1, "rules": [{"kernel": "sage"}, {"kernel": "auto"}]},
         "rule 2 never fits a call, since rule 1"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_in_one_sentence(tmp_path, data, words):
    path = write(tmp_path / "bad.json", data)
    assert policy.is_policy(path) == ("rules" in str(data) and "NaN" not in str(data))
    with pytest.raises(ConfigError, match=words) as caught:
        policy.chosen(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_none_or_too_large_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="neither a file nor one of fast, balanced, safe"):
        policy.chosen(tmp_path / "gone.json")
    with pytest.raises(ConfigError, match="neither a file nor one of fast, balanced, safe"):
        policy.chosen("x" * 300)
    monkeypatch.setattr(policy, "MAX_FILE_BYTES", 10)
    with pytest.raises(ConfigError, match="larger than 10 bytes"):
        policy.chosen(write(tmp_path / "large.json", PRESETS and rules(Rule("sage")).text()))
    (tmp_path / "latin.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        policy.chosen(tmp_path / "latin.json")


@pytest.mark.parametrize(
    ("first", "second", "hides"),
    [
        (Rule("sage"), Rule("auto", layers=("*attn1",), steps="1:2"), True),
        (Rule("sage", layers=("*attn1",)), Rule("auto", layers=("*attn1",)), True),
        (Rule("sage", layers=("*attn1",)), Rule("auto"), False),
        (Rule("sage", steps="0:3"), Rule("auto", steps="1:2"), True),
        (Rule("sage", steps="0:3"), Rule("auto", steps="1:4"), False),
        (Rule("sage", attention="self"), Rule("auto"), False),
        (Rule("sage", min_seq=2), Rule("auto", min_seq=3), True),
        (Rule("sage", min_seq=3), Rule("auto", min_seq=2), False),
    ],
)
def test_only_a_rule_that_is_surely_hidden_is_refused(first, second, hides):
    assert first.hides(second) is hides


# -- what a policy does ----------------------------------------------------------------------------


@pytest.mark.parametrize("forwards", [1, 2])
def test_report_62_bands_of_steps_change_the_kernel(forwards):
    pipe = Loop(forwards=forwards)
    plain = pipe()
    bands = rules(Rule("sdpa", steps=":40%"), Rule("sage", steps="-1:", attention="self"),
                  Rule("fav2", attention="self"))  # fmt: skip
    with sage_plugin.patched(pipe, policy=bands, min_seq=0) as handle:
        ours = pipe()
        again = pipe()
    assert all(map(torch.equal, ours, again))
    with sage_plugin.patched(pipe, kernel="sage", min_seq=0, exclude="*attn2"):
        sage = pipe()
    for number, (mine, host, other) in enumerate(zip(ours, plain, sage, strict=True)):
        step = number // forwards
        assert torch.equal(mine, host) == (step < 2)
        assert torch.equal(mine, other) == (step == 4)
        torch.testing.assert_close(mine, host, rtol=0, atol=0.05)
    for layer, (calls, fallbacks) in counts(handle).items():
        f = 2 * forwards  # two runs
        if "attn2" in layer:
            assert (calls, fallbacks) == (
                {},
                {BY_FIRST_RULE: 2 * f, choice.NO_RULE: 3 * f},
            )
        else:
            assert calls == {"fav2:emulation": 2 * f, "sage:emulation": f}
            assert fallbacks == {BY_FIRST_RULE: 2 * f}
    row = next(row for row in handle.report().rows if row.layer.endswith("attn1"))
    assert row.rule_steps == {1: (0, 1), 2: (4,), 3: (2, 3)}
    assert f"rule 3 x{4 * f} at steps 2-3" in " ".join(handle.report().text().split())
    assert type(pipe.scheduler) is DDIMScheduler


def test_two_transformers_share_the_steps():
    pipe = Loop(second_from=2)
    with sage_plugin.patched(pipe, policy=rules(Rule("sage", steps="1:4")), min_seq=0) as handle:
        pipe()
    steps = {row.layer.split(".")[0]: row.rule_steps for row in handle.report().rows}
    assert steps == {"transformer": {1: (1,)}, "transformer_2": {1: (2, 3)}}


def test_report_50_layers_kinds_lengths_and_fields_choose_and_the_first_rule_wins():
    pipe = Loop()
    made = rules(
        Rule("sdpa", layers=("blocks.0.*",)),
        Rule("fav3_sage", layers=("*attn1",), launch={"smooth_v": False}),
        Rule("sage", attention="cross", min_seq=5),
        Rule("sage", min_seq=10_000),
    )
    with sage_plugin.patched(pipe, policy=made, min_seq=0) as handle:
        ours = pipe()
    first, cross, second, other = (value for _, value in sorted(counts(handle).items()))
    assert first == cross == ({}, {BY_FIRST_RULE: STEPS})
    assert second == ({"fav3_sage:emulation": STEPS}, {})
    sources = {row.layer[-14:]: row.config_sources for row in handle.report().rows}
    assert sources["blocks.1.attn1"] == {"policy": STEPS}
    assert set(sources["blocks.1.attn2"]) <= {"default", "exact", "near"}
    assert other == ({"sage:emulation": STEPS}, {})
    assert handle.report().idle_rules == ("rule 4 (sage on *)",)
    assert "never met: rule 4 (sage on *)" in handle.report().text()
    with sage_plugin.patched(
        pipe,
        min_seq=0,
        policy=rules(made.rules[0], Rule("fav3_sage", layers=("*attn1",)), made.rules[2]),
    ):
        smoothed = pipe()
    assert not torch.equal(ours[0], smoothed[0])


def test_a_field_that_no_launch_can_have_leaves_the_call_with_its_reason(caplog):
    pipe = Loop()
    plain = pipe()
    made = rules(Rule("sage", launch={"block_m": 7}))
    with sage_plugin.patched(pipe, policy=made, min_seq=0) as handle:
        ours = pipe()
    assert all(map(torch.equal, ours, plain))
    (reason,) = {reason for _, fallbacks in counts(handle).values() for reason in fallbacks}
    assert reason.cause is Fallback.ILLEGAL_CONFIG
    assert "block_m 7" in str(reason)
    with (
        pytest.raises(UnsupportedInputError, match="block_m 7"),
        sage_plugin.patched(pipe, policy=made, min_seq=0, on_unsupported="error"),
    ):
        pipe()


def test_a_second_patch_changes_the_policy_and_patched_gives_it_back():
    pipe = Loop()
    handle = sage_plugin.patch(pipe, policy=rules(Rule("sage", steps="0:1", layers=("*attn1",))))
    with sage_plugin.patched(pipe, policy="fast"):
        pipe()
    pipe()
    assert handle.report().rows[0].rule_steps == {1: (0,)}
    sage_plugin.patch(pipe, kernel="sage", min_seq=0)
    assert type(pipe.scheduler) is DDIMScheduler
    assert handle.report().idle_rules == ()
    sage_plugin.unpatch(pipe)


# -- in graphs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wan", "cogx"])
def test_a_graph_takes_the_kernel_of_the_step(name):
    pipe = Loop(name)
    bands = rules(Rule("sdpa", steps="0:2"), Rule("sage", steps="2:4"))
    handle = sage_plugin.patch(pipe, policy=bands, min_seq=0)
    eager, before = pipe(), handle.report()
    counter = CompileCounter()
    module = pipe.tiny["transformer"].module
    ours = pipe(torch.compile(module, backend=counter, fullgraph=True))
    assert counter.frame_count == 1
    for mine, right in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-6)
    after = handle.report()
    for row, old in zip(after.rows, before.rows, strict=True):
        assert row.calls == {k: 2 * n for k, n in old.calls.items()}
        assert row.fallbacks == {k: 2 * n for k, n in old.fallbacks.items()}
    sage_plugin.unpatch(pipe)


def test_twelve_blocks_share_one_graph_and_keep_their_own_rules():
    pipe = Loop("wan12")
    module = pipe.tiny["transformer"].module
    made = rules(Rule("sdpa", layers=("blocks.3.*",)), Rule("sage", steps="1:2"))
    handle = sage_plugin.patch(pipe, policy=made, min_seq=0)
    eager = pipe()
    counter = CompileCounter()
    module.compile_repeated_blocks(fullgraph=True, backend=counter)
    ours = pipe()
    assert counter.frame_count == 1
    for mine, right in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-6)
    kernels = {row.layer: row.kernel_calls() for row in handle.report().rows}
    assert {layer for layer, n in kernels.items() if n == 0} == {
        "transformer.blocks.3.attn1", "transformer.blocks.3.attn2"}  # fmt: skip
    assert set(kernels.values()) == {0, 2}
    sage_plugin.unpatch(pipe)
    ours = pipe()  # the graph of the unpatched model
    assert set(kernels.values()) == {0, 2}


def test_a_graph_outlives_its_patch():
    pipe = Loop()
    plain = pipe()
    sage_plugin.patch(pipe, policy=rules(Rule("sage")), min_seq=0)
    module = pipe.tiny["transformer"].module
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    ours = pipe(compiled)
    assert not torch.equal(ours[0], plain[0])
    sage_plugin.unpatch(pipe)
    assert all(map(torch.equal, pipe(compiled), plain))


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (rules(Rule("sage", layers=("down_blocks.*",)), Rule("auto")),
         "rule 1 of the policy names no layer of this model"),
        (rules(Rule("sage"), model="FluxTransformer2DModel"),
         "for FluxTransformer2DModel, and this is WanTransformer3DModel"),
        (rules(Rule("sage"), Rule("sage")), "rule 2 never fits"),
        ("fastest", "neither a file nor one of fast, balanced, safe"),
    ],
)  # fmt: skip
def test_a_policy_of_another_model_is_refused_and_changes_nothing(made, words):
    pipe = Loop()
    plain = pipe()
    with pytest.raises(ConfigError, match=words):
        sage_plugin.patch(pipe, policy=made, min_seq=0)
    assert all(map(torch.equal, pipe(), plain))
    assert type(pipe.scheduler) is DDIMScheduler
    handle = sage_plugin.patch(pipe, kernel="sage", min_seq=0)
    with pytest.raises(ConfigError):
        sage_plugin.patch(pipe, policy=made, min_seq=0)
    pipe()
    assert handle.report().kernel_calls() == 4 * STEPS


def test_bands_need_a_pipeline_whose_steps_are_counted():
    module = tiny("wan").module
    with pytest.raises(ConfigError, match="patch the pipeline instead of its model"):
        sage_plugin.patch(module, policy=rules(Rule("sage", steps="0:1")))
    handle = sage_plugin.patch(module, policy=rules(Rule("sage")))
    assert handle.layers


def test_a_kernel_beside_a_policy_is_refused():
    with pytest.raises(UsageError, match="a policy names the kernels itself"):
        sage_plugin.patch(tiny("wan").module, kernel="sage", policy="fast")


def test_an_unsupported_call_of_a_policy_is_an_error_on_request_but_its_own_choice_is_not():
    pipe = Loop()
    made = rules(Rule("sage", layers=("*attn1",)))
    with sage_plugin.patched(pipe, policy=made, min_seq=0, on_unsupported="error") as handle:
        pipe()
    assert handle.report().kernel_calls() == 2 * STEPS


def test_rules_of_pages_alone_are_not_for_a_pipeline():
    served = Policy(1, (Rule("fav2", op="paged_attention"), Rule("auto", layers=("*nowhere",))))
    with pytest.raises(ConfigError, match="rule 2 of the policy names no layer"):
        sage_plugin.patch(Loop(), policy=served)
    words = r"no rule of attention, linear, grouped_linear; give it to .*continuous_batching\(\)"
    with pytest.raises(ConfigError, match=words):
        sage_plugin.patch(Loop(), policy=Policy(1, served.rules[:1]))
