"""The whole search on hand-made recordings, against trying every assignment."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

from sage_plugin.errors import CaptureError, ConfigError, SageError, TuningError, UsageError
from sage_plugin.families.attention.replay import AttentionReplay
from sage_plugin.plugin.policy.rules import read
from sage_plugin.tune.policy import front_plot
from sage_plugin.tune.policy.search import search
from tests.accuracy.judged import attention_errors
from tests.tune.policy import recordings
from tests.tune.policy.recordings import EVERYWHERE, LAYERS, MS, PER_STEP, SHAPE, STEPS

KERNELS = ("sage", "fav3_sage", "fav3_fp8")
CELL_CALLS = PER_STEP * STEPS / 2


@pytest.fixture
def folder(tmp_path):
    recordings.write(tmp_path / "captures", uncounted=6)
    recordings.times(tmp_path / "times.json")
    return tmp_path


@pytest.fixture
def refuse_to_measure(monkeypatch):
    def use():
        def fail(*_args, **_more):
            raise AssertionError("measured again")

        monkeypatch.setattr(AttentionReplay, "errors", fail)

    return use


def chosen(found):
    """Each cell with what was chosen for it, by place."""
    pairs = zip(found.problem.cells, found.assignment.picks, strict=True)
    return {cell.place: (cell, pick) for cell, pick in pairs}


def exact_errors():
    """Errors of each kernel at each layer and band, straight from the tensors."""
    return {
        (layer, step // 2): {"sdpa": 0.0} | {
            kernel: attention_errors(
                kernel, "emulation", None, *recordings.drawn(layer, step, distribution),
                causal=False, scale=SHAPE.scale,
            ).worst_head_centred_rel_l1
            for kernel in KERNELS
        }
        for (layer, step), distribution in EVERYWHERE.items()
    }  # fmt: skip


def every(errors):
    """Milliseconds and mean error of every assignment; six more calls stay with the host."""
    total = len(errors) * CELL_CALLS + 6
    for labels in itertools.product(MS, repeat=len(errors)):
        ms = CELL_CALLS * sum(MS[label] for label in labels)
        error = sum(CELL_CALLS * row[k] for row, k in zip(errors.values(), labels, strict=True))
        yield ms, error / total


@pytest.mark.parametrize("budget", [0.01, 0.03])
def test_the_search_finds_what_trying_everything_finds(folder, budget):
    found = search(recordings.request(folder, max_error=budget))
    errors = exact_errors()
    best = min(ms for ms, error in every(errors) if error <= budget)
    assert found.assignment.ms == pytest.approx(best)
    assert found.assignment.error <= budget
    for cell, pick in chosen(found).values():
        assert pick.error == pytest.approx(errors[cell.place][pick.label])
        assert pick.ms == pytest.approx(CELL_CALLS * MS[pick.label])
    prediction = found.policy.prediction
    assert (prediction.device, prediction.steps, prediction.calls) == (recordings.DEVICE, 4, 30)
    assert prediction.of("sdpa").ms == 24.0
    assert prediction.of("policy").ms == pytest.approx(best)
    everywhere = sum(row["sage"] for row in errors.values()) * CELL_CALLS / 30
    assert prediction.of("sage").error == pytest.approx(everywhere, rel=1e-4)
    path = folder / "policy.json"
    path.write_text(found.policy.text())
    assert read(path) == found.policy
    assert found.policy.model == "Toy"
    assert sum(r.saved_ms for r in found.policy.rules) == pytest.approx(24.0 - best)
    cells = json.loads((found.run_folder / "results.json").read_text())["cells"]
    assert [c["chosen"] for c in cells] == [pick.label for pick in found.assignment.picks]


def test_the_dual_finds_the_least_error_within_a_time(folder):
    found = search(recordings.request(folder, max_ms=16.01))
    best = min(error for ms, error in every(exact_errors()) if ms <= 16.01)
    assert found.assignment.ms <= 16.01
    assert found.assignment.error == pytest.approx(best, rel=1e-6)


def test_a_second_search_measures_nothing(folder, refuse_to_measure):
    first = search(recordings.request(folder))
    refuse_to_measure()
    second = search(recordings.request(folder, max_error=0.01))
    assert second.assignment.error <= 0.01 < first.assignment.error
    with pytest.raises(AssertionError, match="measured again"):
        search(recordings.request(folder, fresh=True))


def test_ctrl_c_leaves_what_was_measured_and_the_next_goes_on(folder, monkeypatch):
    real, measured = AttentionReplay.errors, []

    def stop(*args):
        if len(measured) == 4:
            raise KeyboardInterrupt
        measured.append(args[0])
        return real(*args)

    monkeypatch.setattr(AttentionReplay, "errors", stop)
    with pytest.raises(KeyboardInterrupt):
        search(recordings.request(folder))
    assert len(recordings.ledger_lines(folder)) == 4
    after = []
    monkeypatch.setattr(AttentionReplay, "errors", lambda *a: after.append(a) or real(*a))
    search(recordings.request(folder))
    assert len(after) == 6 * len(KERNELS) - 4


def test_damaged_lines_of_the_ledger_are_measured_again(folder, monkeypatch):
    first = search(recordings.request(folder))
    path = folder / "runs" / "r" / "ledger.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(["{", *lines[1:-1], lines[-1][:40]]))
    real, after = AttentionReplay.errors, []
    monkeypatch.setattr(AttentionReplay, "errors", lambda *a: after.append(a) or real(*a))
    assert search(recordings.request(folder)).policy == first.policy
    assert len(after) == 2


@pytest.mark.parametrize(("distribution", "out"), [("outlier", {"sage"}), ("nan", set(KERNELS))])
def test_a_kernel_that_fails_its_gate_on_a_capture_is_never_chosen_there(
    tmp_path, distribution, out
):
    recordings.write(tmp_path / "captures", {**EVERYWHERE, (1, 3): distribution})
    recordings.times(tmp_path / "times.json")
    found = search(recordings.request(tmp_path, max_error=1.0, kernels=KERNELS))
    at = chosen(found)
    labels = {e.label for e in at[1, 1][0].estimates}
    assert not labels & out
    assert at[1, 1][1].label not in out
    assert at[0, 1][1].label == "fav3_fp8"
    assert any(note.startswith("sage is out in 1 of 6") for note in found.notes)


def test_a_cell_without_capture_takes_the_worst_of_its_neighbors(tmp_path):
    captured = {(0, 0): "biased", (2, 0): "normal", (1, 3): "biased"}
    recordings.write(tmp_path / "captures", captured)
    recordings.times(tmp_path / "times.json")
    found = search(recordings.request(tmp_path, max_error=1.0))
    at = {place: cell for place, (cell, _) in chosen(found).items()}
    near = [at[0, 0], at[2, 0], at[1, 1]]
    for kernel in KERNELS:
        worst = max(one.of(kernel).error for one in near)
        assert at[1, 0].of(kernel).error == worst > 0
    assert len(at[1, 0].of("sage").captures) == 3


def test_no_layer_passes_the_cap(folder):
    found = search(recordings.request(folder, max_error=1.0, max_layer_error=0.02))
    assert {pick.label for pick in found.assignment.picks} == {"sage"}


def sensitivity_file(path, rmse, kernel="sage"):
    rows = [
        {"layer": layer, "steps": steps, "rmse": rmse(i, j)}
        for i, layer in enumerate(LAYERS)
        for j, steps in enumerate((":50%", "50%:"))
    ]
    path.write_text(json.dumps({"schema_version": 1, "kernel": kernel, "cells": rows}))
    return path


def test_kernels_stay_out_of_where_the_clip_is_sensitive(folder):
    path = sensitivity_file(folder / "s.json", lambda i, j: 1.0 if (i, j) == (1, 0) else 1e-3)
    found = search(recordings.request(folder, max_error=0.005, sensitivity=path))
    at = {place: pick.label for place, (_, pick) in chosen(found).items()}
    assert at.pop((1, 0)) == "sdpa"
    assert set(at.values()) == {"fav3_fp8"}
    weights = json.loads((found.run_folder / "results.json").read_text())["cells"]
    assert sum(c["weight"] * c["calls"] for c in weights) == pytest.approx(24.0)


def test_sensitivities_of_other_ranges_are_refused(folder):
    path = sensitivity_file(folder / "s.json", lambda i, j: 1.0)
    with pytest.raises(ConfigError, match="search with --step-ranges 2"):
        search(recordings.request(folder, sensitivity=path, step_ranges=4))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"max_error": 1e-6}, TuningError, "the least that does has"),
        ({"max_ms": 1.0, "max_error": None}, TuningError, "the fastest choice takes 13.2"),
        ({"max_ms": 99.0, "max_error": None}, TuningError, "host's attention"),
        ({"max_layer_error": 1e-6}, TuningError, "--max-layer-error"),
        ({"times": ()}, UsageError, "on a CPU kernels are emulated"),
        ({"max_error": float("nan")}, UsageError, "--max-error"),
        ({"max_error": None}, UsageError, "--max-error and --max-ms"),
        ({"max_layer_error": 0.0}, UsageError, "--max-layer-error"),
        ({"min_seq": 0}, UsageError, "--min-seq"),
        ({"run_name": "../up"}, UsageError, "--run-name"),
        ({"kernels": ("flash9",)}, UsageError, "flash9"),
        ({"kernels": ("sage", "fav3_sage+hadamard=32")}, UsageError, "has no times of it; it has"),
        ({"captures_per_cell": 0}, UsageError, "number of captures"),
        ({"min_seq": 100}, CaptureError, "--min-seq"),
    ],
)
def test_what_cannot_be_met_is_one_sentence(folder, changes, error, says):
    with pytest.raises(error, match=says) as caught:
        search(recordings.request(folder, **{"max_ms": None, "max_error": 0.03, **changes}))
    assert "\n" not in str(caught.value)


def test_times_of_other_calls_alone_are_named(folder):
    far = dataclasses.replace(SHAPE, seq_q=4096, seq_k=4096)
    recordings.times(folder / "times.json", shapes=(far,))
    with pytest.raises(SageError, match="times"):
        search(recordings.request(folder))


def test_a_rule_takes_no_call_that_was_to_stay_with_the_host(tmp_path):
    short = dataclasses.replace(SHAPE, seq_q=40, seq_k=40)
    recordings.write(tmp_path / "captures", shapes=(SHAPE, short))
    recordings.times(tmp_path / "times.json")
    found = search(recordings.request(tmp_path, max_error=1.0, min_seq=50))
    assert found.policy.rules
    for rule in found.policy.rules:
        assert rule.fits(SHAPE.seq_q, SHAPE.seq_k)
        assert not rule.fits(40, 40)


def test_the_front_is_drawn(folder):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    found = search(recordings.request(folder))
    assert front_plot.save(found, folder / "front.png", max_error=0.05) == ""
    assert (folder / "front.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(front_plot.figure, "save", lambda draw, *_, **__: draw(figure))
        front_plot.save(found, folder / "front.png", max_error=0.05)
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "--max-error", "best choices, layer by layer", "one kernel everywhere", "the policy",
    ]  # fmt: skip
    assert list(axes.lines[0].get_ydata()) == [0.05, 0.05]
    assert axes.get_ylim()[1] > max(run.error for run in found.prediction.runs)
