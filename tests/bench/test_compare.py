"""One table: rows, self-test, reference, failures; real kernels on a CPU, scripted times."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sage_plugin.bench import compare
from sage_plugin.bench.compare import BenchPlan, run_case
from sage_plugin.bench.suite import captured
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.families.attention import replay
from sage_plugin.families.attention.cost import flops
from sage_plugin.families.attention.replay import AttentionReplay
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.contract import AttentionParams
from sage_plugin.kernels.launch_config import LaunchRules
from sage_plugin.measure.inputs import self_attention
from sage_plugin.measure.timing import Samples
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.schema import LaunchConfig
from tests.bench.folders import drawn, write

CPU = torch.device("cpu")
SHAPE = self_attention(1, 2, 96, 32)
EVERY = tuple((kernel, "auto") for kernel in ("sdpa", "fav2", "sage", "fav3_sage", "fav3_fp8"))


def case_of(shape=SHAPE):
    return drawn(shape, distribution="biased")


@pytest.fixture
def scripted(monkeypatch):
    """Times by name; the functions still run once, as a check that they can."""

    def install(ms, default=2.0):
        def fake(functions, *, device, method, limits, seed):
            for call in functions.values():
                call()
            return {
                name: Samples(name, (ms.get(name, default),) * 8, method or "wall")
                for name in functions
            }

        monkeypatch.setattr(compare, "measure", fake)

    return install


def test_one_timing_feeds_every_column(scripted):
    scripted({"sage:emulation": 4.0, "sage:emulation alone": 3.0})
    table = run_case(case_of(), BenchPlan(kernels=(("sage", "auto"),)), device=CPU)
    row = table.rows[0]
    operations = 4 * 1 * 2 * 96 * 96 * 32
    assert row.flops == operations
    assert row.time.median_ms == 4.0
    assert row.kernel_time.median_ms == 3.0
    assert row.tflops == pytest.approx(operations / 4e-3 / 1e12)
    assert row.gb_per_s == pytest.approx(row.moved_bytes / 4e-3 / 1e9)
    assert row.flop_per_byte == pytest.approx(row.tflops * 1e3 / row.gb_per_s)


def test_rows_carry_identity_and_errors(scripted):
    scripted({})
    table = run_case(case_of(), BenchPlan(kernels=EVERY, method="wall"), device=CPU)
    assert [row.kernel for row in table.rows] == ["sdpa", "fav2", "sage", "fav3_sage", "fav3_fp8"]
    by_name = {row.kernel: row for row in table.rows}
    assert by_name["sdpa"].config is None
    assert by_name["sdpa"].note == ""
    assert by_name["sage"].config_source == "default"
    assert by_name["sage"].note == "emulation: not a speed"
    assert by_name["fav2"].kernel_time is None
    assert all(row.gate == () for row in table.rows)
    centered = [by_name[name].errors.centred_rel_l1 for name in ("fav2", "sage", "fav3_sage")]
    assert centered == sorted(centered)
    assert all(row.time.method == "wall" for row in table.rows)


def test_the_first_kernel_is_timed_against_itself(scripted):
    scripted({"sage:emulation again": 2.1})
    table = run_case(case_of(), BenchPlan(kernels=(("sage", "auto"),)), device=CPU)
    assert table.aa_ratio == pytest.approx(2.0 / 2.1)
    assert table.stamp == table.rows[0].stamp == "noisy"
    scripted({})
    assert run_case(case_of(), BenchPlan(kernels=(("sage", "auto"),)), device=CPU).stamp == "clean"


def test_a_reference_is_added_timed_and_compared_with(scripted):
    scripted({"fav2:emulation": 6.0, "sage:emulation": 2.0})
    plan = BenchPlan(kernels=(("sage", "auto"),), reference=("fav2", "auto"))
    table = run_case(case_of(), plan, device=CPU)
    fav2, sage = table.rows
    assert sage.reference == fav2.reference == "fav2:emulation"
    assert sage.speedup == pytest.approx(3.0)
    assert sage.speedup_low <= sage.speedup <= sage.speedup_high
    assert fav2.speedup is None
    assert fav2.reference_errors.rel_l1 == 0.0
    assert sage.reference_errors.rel_l1 == pytest.approx(sage.errors.rel_l1, rel=0.2)


def test_a_reference_that_is_among_the_kernels_is_run_once(scripted):
    scripted({})
    plan = BenchPlan(kernels=(("sage", "auto"), ("fav2", "auto")), reference=("fav2", "emulation"))
    assert [r.kernel for r in run_case(case_of(), plan, device=CPU).rows] == ["fav2", "sage"]


def test_a_reference_is_found_by_its_variant_too(scripted, monkeypatch):
    scripted({})
    real = replay.implementation
    monkeypatch.setattr(
        replay, "implementation", lambda kernel, _, fp8: real(kernel, "emulation", fp8)
    )
    monkeypatch.setattr(AttentionReplay, "checked", _emulated(AttentionReplay.checked))
    plan = BenchPlan(kernels=(("sage", "emulation"),), reference=("sage", "portable"))
    table = run_case(case_of(), plan, device=CPU)
    assert [row.label for row in table.rows] == ["sage:portable", "sage:emulation"]
    assert {row.reference for row in table.rows} == {"sage:portable"}
    assert [row.speedup for row in table.rows] == [None, 1.0]


def _emulated(real):
    def checked(call, decision, config, exact):
        return real(call, dataclasses.replace(decision, variant="emulation"), config, exact)

    return checked


def breaks(monkeypatch, name, why):
    """Let a kernel, or each of a variant, be one that cannot be built."""
    real = replay.implementation

    def broken(*named):
        if name in named:
            raise RuntimeError(why)
        return real(*named)

    monkeypatch.setattr(replay, "implementation", broken)


def test_another_variant_does_not_stand_in_for_a_reference_that_failed(scripted, monkeypatch):
    scripted({})
    breaks(monkeypatch, "portable", "no GPU")
    monkeypatch.setattr(AttentionReplay, "checked", _emulated(AttentionReplay.checked))
    plan = BenchPlan(kernels=(("sage", "emulation"),), reference=("sage", "portable"))
    (row,) = run_case(case_of(), plan, device=CPU).rows
    assert (row.label, row.reference, row.reference_errors) == ("sage:emulation", "", None)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["key_bias", "dense"])
@pytest.mark.parametrize("made", ["drawn", "captured"])
def test_masked_inputs_run_on_every_kernel_with_their_mask(
    scripted, tmp_path, kind, causal, made, monkeypatch
):
    scripted({})
    shape = dataclasses.replace(
        self_attention(2, 4, 64, 32), heads_k=2, causal=causal, mask_kind=kind, layout="bshd"
    )
    case = case_of(shape) if made == "drawn" else captured(write(tmp_path / "c", shape)).cases[0]
    plan = BenchPlan(kernels=(("torch", "auto"), *EVERY), reference=("fav2", "auto"))
    table = run_case(case, plan, device=CPU)
    assert table.failed == ()
    assert [row.gate for row in table.rows] == [()] * 6
    by_name = {row.kernel: row for row in table.rows}
    assert by_name["torch"].errors.rel_l1 == 0.0
    mask = case.load(CPU).mask
    assert {row.flops for row in table.rows} == {flops(shape, mask)}
    assert flops(shape, mask) < flops(shape)
    unmasked = AttentionParams(shape.scale, causal, "bshd")
    monkeypatch.setattr(replay, "AttentionParams", lambda *_, **__: unmasked)
    other = run_case(case, plan, device=CPU)
    read = {row.kernel: row.moved_bytes for row in other.rows}
    assert all(row.moved_bytes > read[row.kernel] for row in table.rows), "the timed calls, too"


def test_a_kernel_that_forgets_its_mask_fails_its_gate(scripted, monkeypatch):
    scripted({})
    real = AttentionReplay.checked

    def forgetful(call, *args):
        return real(dataclasses.replace(call, mask=None), *args)

    monkeypatch.setattr(AttentionReplay, "checked", forgetful)
    case = case_of(dataclasses.replace(SHAPE, mask_kind="key_bias"))
    (row,) = run_case(case, BenchPlan(kernels=(("fav2", "auto"),)), device=CPU).rows
    assert any("relative L1" in sentence for sentence in row.gate)


def test_memory_that_does_not_hold_an_input_is_a_sentence(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    monkeypatch.setattr(ReplayInputs, "load", full)
    with pytest.raises(UnsupportedInputError, match="cpu has not enough memory"):
        run_case(case_of(), BenchPlan(kernels=EVERY), device=CPU)


def test_a_failing_kernel_does_not_end_the_table(scripted, monkeypatch):
    scripted({})
    breaks(monkeypatch, "sage", "ptxas died\nwith a long story")
    table = run_case(case_of(), BenchPlan(kernels=EVERY), device=CPU)
    assert len(table.rows) == 4
    assert table.failed == ("sage failed: RuntimeError: ptxas died",)


def test_no_kernel_at_all_is_an_error_with_the_reasons():
    shape = dataclasses.replace(SHAPE, head_dim=512, dv=512)
    with pytest.raises(UnsupportedInputError, match="no kernel could run it: sage cannot run"):
        run_case(case_of(shape), BenchPlan(kernels=(("sage", "auto"),)), device=CPU)


def test_a_wrong_kernel_fails_its_gate(scripted, monkeypatch):
    scripted({})
    real = AttentionReplay.checked

    def wrong(*args, **options):
        found = real(*args, **options)
        return dataclasses.replace(found, out=found.out * torch.linspace(-1, 1, 32))

    monkeypatch.setattr(AttentionReplay, "checked", wrong)
    row = run_case(case_of(), BenchPlan(kernels=(("sage", "auto"),)), device=CPU).rows[0]
    assert any("cosine of the worst head" in sentence for sentence in row.gate)


def test_the_config_of_the_runtime_is_judged_and_timed(scripted, monkeypatch):
    scripted({})
    config = LaunchConfig(64, 32, 4, 1, "pointer", True, True, 1)
    seen = []

    def found(rules, key, facts, *, config_dir):
        seen.append(config_dir)
        return dispatch.ResolvedConfig(config, "exact", "a file")

    monkeypatch.setattr(LaunchRules, "find", found)
    plan = BenchPlan(kernels=(("sage", "auto"),), config_dir="somewhere")
    row = run_case(case_of(), plan, device=CPU).rows[0]
    assert (row.config, row.config_source, seen) == (config, "exact", ["somewhere"])


def test_layout_causal_and_groups_with_real_times():
    shape = dataclasses.replace(
        self_attention(2, 4, 40, 32), heads_k=2, seq_k=56, causal=True, layout="bshd"
    )
    plan = BenchPlan(kernels=(("fav3_sage", "auto"), ("torch", "auto")), differences=True)
    table = run_case(case_of(shape), plan, device=CPU)
    assert [row.gate for row in table.rows] == [(), ()]
    assert table.rows[0].shape == shape
    assert table.rows[0].difference.shape == (2, 4, 40, 32)
    assert table.rows[1].errors.rel_l1 == 0.0
    assert 2 <= table.rows[0].time.n <= compare.CPU_LIMITS.max_samples


@pytest.mark.gpu
def test_every_kernel_on_a_gpu():
    facts = dispatch.facts_of("cuda", None)
    kernels = tuple((name, "auto") for name in dispatch.kernels_of(facts))
    plan = BenchPlan(kernels=kernels, reference=("sdpa", "auto"))
    table = run_case(case_of(self_attention(1, 4, 4096, 64)), plan, device=torch.device("cuda"))
    assert table.failed == ()
    assert all(row.gate == () for row in table.rows)
    assert all(row.note == "" and row.time.method == "events" for row in table.rows)
