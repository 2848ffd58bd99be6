"""Recording from real models: what is saved is what attention got, and the model is left alone."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import sage_plugin
from sage_plugin.capture.ops import attention
from sage_plugin.capture.recording.recorder import CaptureOptions, CaptureRecorder, record
from sage_plugin.capture.store.manifest import read_counts
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.errors import CaptureError, OutputError, PatchError, UsageError
from sage_plugin.plugin.patch import handle_of
from sage_plugin.plugin.steps.forward import Forward, Timestep
from tests.capture.toys import LAYERS, Pipeline, denoise, event, processors, video_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "captures"


@pytest.fixture
def sdpa_calls(monkeypatch):
    """What `F.scaled_dot_product_attention` got, copied."""
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention

    def probe(q, k, v, *args, **kwargs):
        calls.append(tuple(t.clone() for t in (q, k, v)))
        return original(q, k, v, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", probe)
    return calls


def test_saved_is_what_attention_got(folder, sdpa_calls):
    model = video_model()
    with record(model, folder, max_captures=100):
        denoise(model, steps=4)
    captures = open_captures(folder)
    assert len(captures.records) == len(sdpa_calls) == 4 * LAYERS
    for number, (saved, got) in enumerate(zip(captures.records, sdpa_calls, strict=True)):
        call = captures.load(saved)
        assert torch.equal(call.q, got[0])
        assert torch.equal(call.k, got[1])
        assert torch.equal(call.v, got[2])
        step, layer = divmod(number, LAYERS)
        assert (saved.step, saved.timestep, saved.call_index) == (step, 900.0 - step, 0)
        assert saved.layer == f"transformer.transformer_blocks.{layer}.attn1"
        assert saved.text_length == 8
        assert saved.strides_q == got[0].stride()
        assert saved.model_class == "CogVideoXTransformer3DModel"
        assert len(saved.config_hash) == 16
        assert torch.__version__.startswith(saved.versions["torch"].split("+")[0])


def test_the_spread_and_the_counts_of_all_calls(folder):
    model = video_model()
    with record(model, folder, max_captures=4, total_steps=12) as recorder:
        denoise(model, steps=12)
    summary = recorder.summary
    assert summary.files == 4
    assert summary.steps_saved == (1, 4, 7, 10)
    assert len(summary.layers_saved) == LAYERS
    assert summary.calls_seen == 12 * LAYERS
    assert summary.calls_seen == summary.files + sum(summary.skipped.values())
    counts = open_captures(folder).call_counts
    assert counts.complete
    assert set(counts.layers.values()) == {12}
    assert counts.steps == {"transformer": 12}
    assert [s.calls for s in counts.shapes] == [12 * LAYERS]
    assert summary.bytes == sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def test_every_nth_step_and_a_few_of_each_shape(folder):
    model = video_model()
    with record(model, folder, every=3, per_shape=2) as recorder:
        denoise(model, steps=8)
    assert recorder.summary.files == 2
    assert set(recorder.summary.steps_saved) <= {0, 3, 6}
    assert recorder.summary.skipped["step not selected"] == 5 * LAYERS


def test_no_more_files_than_asked_for_at_any_time(folder):
    model = video_model()
    most = 0

    def count(_record):
        nonlocal most
        most = max(most, len(list(folder.glob("*.safetensors"))))

    with record(model, folder, max_captures=3, on_save=count) as recorder:
        denoise(model, steps=20)
    assert most == 3
    assert recorder.summary.files == len(list(folder.glob("*.safetensors"))) == 3
    assert recorder.summary.calls_seen == 3 + sum(recorder.summary.skipped.values())


def test_a_pipeline_says_how_many_steps_it_has(folder):
    """Then the first call alone is written only to be deleted again."""
    model = video_model()
    pipe = Pipeline(transformer=model, num_timesteps=10)
    saves = []
    with record(pipe, folder, max_captures=3, on_save=saves.append):
        denoise(model, steps=10)
    assert len(saves) == 4
    assert saves[0].step == 0
    scheduled = Pipeline(transformer=model)
    scheduled.scheduler = type("Scheduler", (), {"timesteps": torch.arange(10)})()
    saves.clear()
    with record(scheduled, folder, max_captures=3, overwrite=True, on_save=saves.append):
        denoise(model, steps=10)
    assert len(saves) == 4


def test_two_denoisers_count_their_own_steps(folder):
    first, second = video_model(), video_model()
    pipe = Pipeline(transformer=first, transformer_2=second, num_timesteps=6)
    with record(pipe, folder, max_captures=6) as recorder:
        denoise(first, steps=4)
        denoise(second, steps=2)
    assert recorder.summary.steps == {"transformer": 4, "transformer_2": 2}
    assert recorder.summary.files == 6
    assert {r.layer.split(".")[0] for r in open_captures(folder).records} == {
        "transformer",
        "transformer_2",
    }


def test_filters(folder):
    model = video_model()
    with record(
        model,
        folder,
        max_captures=50,
        layers=["*.0.attn1", "*.2.*"],
        steps="1,3-",
        heads=1,
        batch=[1],
    ):
        denoise(model, steps=5)
    captures = open_captures(folder)
    assert {r.step for r in captures.records} == {1, 3, 4}
    assert {r.layer.split(".")[2] for r in captures.records} == {"0", "2"}
    assert {(r.batch_indices, r.head_indices) for r in captures.records} == {((1,), (1,))}
    assert captures.load(captures.records[0]).q.shape == (1, 1, 40, 16)
    assert captures.records[0].shape.heads_q == 2
    assert len(captures.counts) == LAYERS, "all layers are counted"


def test_the_byte_budget_holds(folder):
    """G4: heads are left out, and the folder stays below the limit."""
    model = video_model()
    limit = 4 * 25_000
    with record(model, folder, max_captures=4, max_bytes=limit) as recorder:
        denoise(model, steps=6)
    assert recorder.summary.files == 4
    assert recorder.summary.partial == 4
    assert sum(p.stat().st_size for p in folder.iterdir()) <= limit
    assert {len(r.head_indices) for r in open_captures(folder).records} == {1}


def test_ten_thousand_large_calls_stay_within_the_budget(folder):
    """G4: nothing piles up in memory, and the counts say what was left out and why."""
    recorder = CaptureRecorder(folder, CaptureOptions(max_captures=5, max_bytes=5 * 40_000))
    recorder._intake.add_layers("attention", [f"transformer.blocks.{i}.attn1" for i in range(10)])
    recorder._intake.open()
    model = video_model()
    too_large, large = torch.randn(2, 16, 100, 64), torch.randn(1, 12, 40, 16)
    for number in range(10_000):
        step, layer = divmod(number, 10)
        forward = Forward(model, step, Timestep(None))
        tensor = too_large if number % 2 else large
        name = f"transformer.blocks.{layer}.attn1"
        recorder._intake.take(forward, event(tensor, layer=name))
    recorder._intake.close({"transformer": 1000})
    captures = open_captures(folder)
    assert len(captures.records) == 5
    assert captures.call_counts.total == 10_000
    assert sum(captures.call_counts.skipped.values()) == 9_995
    assert any("budget" in reason for reason in captures.call_counts.skipped)
    assert sum(p.stat().st_size for p in folder.iterdir()) <= 5 * 40_000


def test_an_unpatched_model_is_left_as_it_was(folder):
    model = video_model()
    before, reference = processors(model), _output(model)
    with record(model, folder):
        assert torch.equal(_output(model), reference)
    assert processors(model) == before
    assert not model._forward_pre_hooks
    assert handle_of(model) is None
    assert torch.equal(_output(model), reference)


def test_a_patched_model_is_recorded_on_its_kernels(folder):
    model = video_model()
    handle = sage_plugin.patch(model, kernel="sage", min_seq=0)
    with record(model, folder):
        denoise(model, steps=2)
    assert handle_of(model) is handle
    assert handle.listeners == []
    assert handle.report().kernel_calls() == 2 * LAYERS
    handle.unpatch()


def test_a_patch_made_while_recording_stays(folder):
    model = video_model()
    with record(model, folder):
        sage_plugin.patch(model, kernel="sage", min_seq=0)
    assert handle_of(model) is not None


def test_models_that_make_no_denoising_steps(folder):
    """A single query is a decode step: counted, not saved."""
    from diffusers.models.attention_processor import Attention

    layer = torch.nn.ModuleDict({"attn": Attention(query_dim=8, heads=2, dim_head=4)})
    with record(layer, folder, min_seq=2) as recorder:
        layer["attn"](torch.ones(1, 1, 8))
        layer["attn"](torch.ones(1, 4, 8))
    assert recorder.summary.files == 1
    assert recorder.summary.skipped == {"fewer than 2 queries or keys": 1}


def test_objects_without_attention(folder):
    for wrong in (None, 3, "model"):
        with pytest.raises(PatchError):
            record(wrong, folder)
    with pytest.raises(PatchError), record(torch.nn.Linear(2, 2), folder):
        pass
    assert not folder.exists()


def test_globs_that_match_nothing(folder):
    model = video_model()
    with pytest.raises(UsageError, match=r"'nope' match none of 3 .*transformer_blocks\.0"):
        record(model, folder, layers="nope").open()
    assert handle_of(model) is None
    assert not folder.exists()


def test_a_folder_that_may_not_be_replaced_leaves_the_model_alone(folder):
    model = video_model()
    with record(model, folder):
        denoise(model, steps=1)
    with pytest.raises(CaptureError, match="overwrite"), record(model, folder):
        pass
    assert handle_of(model) is None


def test_a_full_disk_stops_the_recording_and_not_the_model(folder, monkeypatch):
    from sage_plugin.capture.store import writer

    model = video_model()

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    recorder = record(model, folder)
    recorder.open()
    denoise(model, steps=1)
    monkeypatch.setattr(writer, "save_file", full)
    denoise(model, steps=2)
    with pytest.raises(OutputError, match="No space left"):
        recorder.close()
    assert recorder.summary.calls_seen == 3 * LAYERS
    assert len(open_captures(folder).records) == LAYERS
    assert not open_captures(folder).call_counts.complete


def test_no_memory_for_the_copy_costs_that_capture_alone(folder, monkeypatch):
    model = video_model()
    original, left = attention.extract, [2]

    def short(call, part):
        left[0] -= 1
        if left[0] >= 0:
            raise torch.OutOfMemoryError
        return original(call, part)

    monkeypatch.setattr(attention, "extract", short)
    with record(model, folder, max_captures=LAYERS, total_steps=4) as recorder:
        denoise(model, steps=4)
    assert recorder.summary.skipped["the device had no memory left for the copy"] == 2
    assert recorder.summary.files >= 2


def test_a_script_may_change_directory(folder, tmp_path, monkeypatch):
    model = video_model()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    with record(model, "captures"):
        monkeypatch.chdir(tmp_path / "other")
        denoise(model, steps=1)
    assert len(open_captures(folder).records) == LAYERS


def test_an_error_of_the_model_keeps_the_captures(folder):
    model = video_model()
    hook = model.register_forward_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError), record(model, folder):
        denoise(model, steps=1)
    hook.remove()
    assert len(open_captures(folder).records) == LAYERS
    assert handle_of(model) is None


def test_a_killed_process_leaves_a_readable_folder(folder):
    program = (
        "import os, sys; from tests.capture.toys import *; from sage_plugin import record\n"
        "model = video_model()\n"
        "with record(model, sys.argv[1], max_captures=4):\n"
        "    denoise(model, steps=3); os.kill(os.getpid(), 9)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(folder)], cwd=ROOT, check=False)
    assert ran.returncode == -9
    captures = open_captures(folder)
    assert len(captures.records) == 4
    assert captures.problems == ()
    assert not captures.call_counts.complete
    assert captures.call_counts.total > 0


def test_compiled_models_are_said_to_be_out_of_reach(folder, caplog):
    """G1: hooks are silent inside a compiled graph; the reason is said, before and after."""
    model = video_model()
    model.compile(backend="eager")
    with caplog.at_level(logging.WARNING), record(model, folder) as recorder:
        denoise(model, steps=2)
    assert recorder.summary.files == 0
    assert "torch.compile" in recorder.summary.why_nothing()
    assert sum("torch.compile" in r.message for r in caplog.records) == 2
    assert not folder.exists()
    torch.compiler.reset()


def test_wrapped_compiled_models_too(folder, caplog):
    pipe = Pipeline(transformer=torch.compile(video_model(), backend="eager"))
    with caplog.at_level(logging.WARNING), record(pipe, folder):
        pass
    assert "record it before compiling" in caplog.text


def test_threads_do_not_lose_calls(folder):
    models = [video_model(), video_model()]
    pipe = Pipeline(transformer=models[0], transformer_2=models[1])
    with record(pipe, folder, max_captures=5) as recorder:
        threads = [threading.Thread(target=denoise, args=(m, 6)) for m in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert recorder.summary.calls_seen == 2 * 6 * LAYERS
    assert recorder.summary.files == 5


def test_counts_of_a_long_run_are_written_while_it_runs(folder, monkeypatch):
    from sage_plugin.capture.recording import recorder as module

    monkeypatch.setattr(module, "_COUNTS_EVERY_S", 0.0)
    model = video_model()
    with record(model, folder, max_captures=1, steps=[0]):
        denoise(model, steps=5)
        assert read_counts(folder).layers["transformer.transformer_blocks.0.attn1"] == 4


def _output(model: torch.nn.Module) -> torch.Tensor:
    kept = []
    hook = model.register_forward_hook(lambda _m, _a, out: kept.append(out[0]))
    denoise(model, steps=1)
    hook.remove()
    return kept[0]
