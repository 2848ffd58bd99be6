"""A whole proof on a toy pipeline: what each config draws, and what comes of it."""

from __future__ import annotations

import itertools
import math
import types

import numpy as np
import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("skimage")

from sage_plugin.bench.clips import run
from sage_plugin.bench.clips.draw import Subject
from sage_plugin.bench.clips.run import compare_clips
from sage_plugin.bench.clips.run_config import RunConfig, run_configs
from sage_plugin.bench.clips.stopwatch import RunTime
from sage_plugin.errors import ConfigError, DeviceError, UsageError
from sage_plugin.plugin.policy.rules import Policy, PredictedRun, Prediction, Rule
from tests.bench.clips.pipelines import STEPS, drawing, toy

CPU = torch.device("cpu")
PREDICTION = Prediction(
    "CPU of another",
    STEPS,
    STEPS + 1,
    (
        PredictedRun("sdpa", 9.0, 0.0),
        PredictedRun("sage", 4.0, 0.5),
        PredictedRun("policy", 6.0, 0.25),
    ),
)
RULES = (Rule("sdpa", steps=":2"), Rule("fav3_sage", steps="2:3"), Rule("sage"))
BY_HOST = "host: the policy's rule 1 leaves it to the host"


@pytest.fixture(autouse=True)
def _plain(unconfigured):
    """No configs of the user's."""


def subject(pipe=None, **options):
    pipe = pipe or toy()
    return Subject(pipe, drawing(pipe), CPU, min_seq=0, **options)


def proof_of(policy=None, kernels=("sage", "fav2")):
    return compare_clips(subject(), run_configs(kernels, policy))


def test_the_host_is_itself_and_each_kernel_is_some_way_off():
    proof, clips = proof_of()
    host, sage, fav2 = proof.rows
    assert [row.name for row in proof.rows] == ["sdpa", "sage", "fav2"] == list(clips)
    assert host.quality.mean_psnr_db == math.inf
    assert host.quality.ssim == (1.0, 1.0)
    assert host.step_error == (0.0,) * STEPS
    assert (host.kernel_calls, host.attention_calls) == (0, STEPS)
    assert 20 < sage.quality.mean_psnr_db < fav2.quality.mean_psnr_db
    assert len(sage.step_error) == STEPS
    assert all(x > 0 for x in sage.step_error)
    assert sage.step_error[0] < sage.step_error[-1]
    assert (sage.kernel_calls, sage.ran) == (STEPS, {"sage:emulation": STEPS})
    assert np.abs(clips["sage"] - clips["sdpa"]).max() > 0


def test_a_policy_draws_what_its_rules_say():
    proof, _ = proof_of(Policy(1, RULES), kernels=("sage",))
    ours, sage = proof.rows[-1], proof.of("sage")
    assert ours.ran == {BY_HOST: 2, "fav3_sage:emulation": 1, "sage:emulation": 1}
    assert ours.kernel_calls == 2
    assert ours.step_error[:2] == (0.0, 0.0)
    assert 0 < ours.step_error[2] < ours.step_error[3]
    assert sage.step_error[0] > 0


def test_the_policy_of_one_kernel_draws_that_kernels_clip():
    proof, clips = proof_of(Policy(1, (Rule("sage"),)), kernels=("sage",))
    assert np.array_equal(clips["policy"], clips["sage"])
    assert proof.of("policy").quality == proof.of("sage").quality


def test_the_prediction_stands_beside_the_real():
    proof, _ = proof_of(Policy(1, RULES, prediction=PREDICTION))
    host, sage, fav2, ours = proof.rows
    assert (host.predicted_ms, host.predicted_saved_ms) == (9.0, 0.0)
    assert (sage.predicted_ms, sage.predicted_error, sage.predicted_saved_ms) == (4.0, 0.5, 5.0)
    assert (ours.predicted_ms, ours.predicted_error, ours.predicted_saved_ms) == (6.0, 0.25, 3.0)
    assert (fav2.predicted_ms, fav2.predicted_error, fav2.predicted_saved_ms) == (None, None, None)
    assert any(
        note.startswith("predicted for CPU of another, and this is CPU") for note in proof.notes
    )
    assert "predicted for a run of 5 attention calls, and this one has 4" in proof.notes


def test_without_a_prediction_nothing_is_predicted():
    proof, _ = proof_of(Policy(1, RULES))
    assert {row.predicted_ms for row in proof.rows} == {None}
    assert proof.notes == ()


def test_emulated_kernels_are_not_timed():
    proof, _ = proof_of()
    assert {row.time for row in proof.rows} == {None}
    assert {row.note for row in proof.rows} == {"emulation: not a speed"}
    assert (proof.stamp, proof.aa_ratio, proof.gain_over_front_db) == ("", None, None)


# -- times, with a stand-in for the rounds -----------------------------------------------------


STEP_MS = {"sdpa": 10.0, "sdpa again": 10.05, "sage": 4.0, "fav2": 8.0, "policy": 5.0}


def run_time(step_ms):
    return RunTime(step_ms, step_ms, step_ms, (step_ms,), 4 * step_ms, 0.0, 0.0, 5)


@pytest.fixture
def asked(monkeypatch):
    """Times of their own for all that is timed; yields what was asked for."""
    asked = {}

    def time_runs(subject, patches, denoisers, **options):
        asked.update(patches=patches, denoisers=denoisers, **options)
        return {name: run_time(STEP_MS[name]) for name in patches}

    monkeypatch.setattr(run, "time_runs", time_runs)
    monkeypatch.setattr(run, "snapshot", lambda device: None)
    monkeypatch.setattr(Subject, "wait", lambda subject: None)
    gpu = types.SimpleNamespace(name="H100")
    monkeypatch.setattr(run, "devices", types.SimpleNamespace(facts=lambda device: gpu))
    return asked


@pytest.fixture
def timed(asked, monkeypatch):
    """Let the emulated kernels pass for real ones."""
    monkeypatch.setattr(run.Drawn, "emulated", property(lambda drawn: False))
    return asked


def proof_on_a_gpu(policy):
    pipe = toy()
    on_gpu = Subject(pipe, drawing(pipe), torch.device("cuda"), min_seq=0)
    return compare_clips(on_gpu, run_configs(("sage", "fav2"), policy), seed=3)[0]


def test_times_savings_and_the_line(timed):
    proof = proof_on_a_gpu(Policy(1, RULES, prediction=PREDICTION))
    _, sage, fav2, ours = proof.rows
    assert [row.time.step_ms for row in proof.rows] == [10.0, 4.0, 8.0, 5.0]
    assert [row.saved_ms for row in proof.rows] == [0.0, 24.0, 8.0, 20.0]
    assert ours.predicted_saved_ms == 3.0
    assert proof.aa_ratio == pytest.approx(1.005)
    assert proof.stamp == "clean"
    assert proof.notes[0] == "predicted for CPU of another, and this is H100"
    assert {row.note for row in proof.rows} == {""}
    assert timed["seed"] == 3
    low, high = sage.quality.mean_psnr_db, fav2.quality.mean_psnr_db
    expected = ours.quality.mean_psnr_db - (low + (high - low) / 4)
    assert proof.gain_over_front_db == pytest.approx(expected)
    assert [point.name for point in proof.kernel_points] == ["sage", "fav2"]


def test_the_host_is_timed_unpatched_and_twice(timed):
    proof_on_a_gpu(Policy(1, RULES))
    assert list(timed["patches"]) == ["sdpa", "sdpa again", "sage", "fav2", "policy"]
    with timed["patches"]["sdpa"]() as nothing:
        assert nothing is None
    with timed["patches"]["sage"]() as handle:
        assert list(handle.components.values()) == timed["denoisers"]
    assert [type(module).__name__ for module in timed["denoisers"]] == ["ToyTransformer"]


def test_an_emulated_kernel_is_not_timed_on_a_gpu_either(asked):
    proof = proof_on_a_gpu(Policy(1, (Rule("sdpa"),)))
    assert list(asked["patches"]) == ["sdpa", "sdpa again", "policy"]
    assert [row.time is None for row in proof.rows] == [False, True, True, False]
    notes = ["", "emulation: not a speed", "emulation: not a speed", ""]
    assert [row.note for row in proof.rows] == notes


# -- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [[], [RunConfig("sage", "sage")], [RunConfig("a"), RunConfig("a", "sage")]]
)
def test_ways_that_are_none(wrong):
    with pytest.raises(UsageError, match="the baseline first"):
        compare_clips(subject(), wrong)


def test_a_policy_of_another_model_is_refused_before_anything_is_drawn():
    drawn = []
    pipe = toy()
    elsewhere = Policy(1, (Rule("sage", layers=("*blocks.9.*",)),))
    with pytest.raises(ConfigError, match="names no layer"):
        compare_clips(Subject(pipe, drawn.append, CPU, min_seq=0), run_configs((), elsewhere))
    assert drawn == []


def test_nan_is_an_error_that_names_the_config():
    pipe = toy()
    draw, calls = drawing(pipe), itertools.count()

    def broken(on_step):
        clip = draw(on_step)
        return clip if next(calls) == 0 else clip * np.nan

    with pytest.raises(DeviceError, match="drawn with sage holds NaN"):
        compare_clips(Subject(pipe, broken, CPU, min_seq=0), run_configs(("sage",)))


def test_too_little_memory_is_a_sentence():
    def full(on_step):
        raise torch.OutOfMemoryError

    with pytest.raises(DeviceError, match="drawing with sdpa does not fit into the memory"):
        compare_clips(Subject(toy(), full, CPU, min_seq=0), run_configs(()))


def test_the_pipeline_is_left_unpatched():
    from sage_plugin.plugin.patch import handle_of

    pipe = toy()
    compare_clips(subject(pipe), run_configs(("sage",)))
    assert handle_of(pipe) is None


def test_what_is_told_and_what_is_kept_meanwhile():
    told, kept = [], []
    clock = itertools.count(step=45)  # seconds a look
    compare_clips(
        subject(),
        run_configs(("sage", "fav2")),
        report_progress=told.append,
        on_clip=lambda clips: kept.append(list(clips)),
        now=lambda: next(clock),
    )
    assert told == [
        "drawing with sdpa (1 of 3)",
        "drawing with sage (2 of 3), at least 2 minutes to go",
        "drawing with fav2 (3 of 3), about 45 seconds to go",
    ]
    assert kept == [["sdpa"], ["sdpa", "sage"], ["sdpa", "sage", "fav2"]]
