"""Tuning at the start of a service: what is missing, within a time, never inside a request."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import sage_plugin
from sage_plugin import device
from sage_plugin.device import Gpu
from sage_plugin.errors import UsageError
from sage_plugin.kernels.attention import dispatch
from sage_plugin.registry import load
from sage_plugin.schema import LinearShape
from sage_plugin.tune import autotune as home
from sage_plugin.tune.configs import subprocess_runner
from tests.capture.toys import LAYERS, denoise, video_model
from tests.kernels.devices import facts
from tests.tune import captures
from tests.tune.captures import GROUPED, SELF
from tests.tune.scripted import ScriptedRunner
from tests.tune.test_lanes import meeting

CPU, H200 = device.facts("cpu"), facts("sm_90")
CONFIGS = Path("c") / CPU.slug / "attention.json"


@pytest.fixture(autouse=True)
def runner(monkeypatch, tmp_path) -> ScriptedRunner:
    """Scripted candidates in an empty folder, without shipped configs."""
    made = ScriptedRunner(lambda config: 0.5 if config.block_n == 64 else 1.0)
    monkeypatch.setattr(subprocess_runner, "SubprocessRunner", lambda **_: made)
    monkeypatch.setattr(load, "shipped_dir", lambda: None)
    monkeypatch.chdir(tmp_path)
    dispatch.forget()
    return made


def autotune(target, **options):
    return sage_plugin.autotune(target, budget_s=60.0, config_dir="c", **options)


def test_a_loaded_model_is_tuned_by_its_configuration_and_once(runner):
    model = video_model()
    done = autotune(model)
    (shape,) = done.calls
    assert (shape.batch, shape.heads_q, shape.seq_q, shape.head_dim) == (2, 2, 8 + 2 * 4 * 4, 16)
    assert shape.dtype == "float32"
    assert done.tuned == done.calls
    assert done.complete
    (entry,) = load.read(CONFIGS).entries
    assert (entry.key.seq_q, entry.evidence.synthetic) == (40, True)
    tried = len(runner.screened)
    again = autotune(model)
    assert (again.report, again.tuned, again.complete) == (None, (), True)
    assert len(runner.screened) == tried
    assert autotune(model, only_missing=False).tuned == done.tuned


def test_a_first_step_is_recorded_and_tuned_on():
    model = video_model()
    processors = {m.processor for m in model.modules() if hasattr(m, "processor")}
    done = autotune(model, first_step=lambda: denoise(model, steps=1))
    assert [shape.seq_q for shape in done.tuned] == [40]
    (entry,) = load.read(CONFIGS).entries
    assert not entry.evidence.synthetic
    assert len(entry.evidence.inputs) == LAYERS
    assert {m.processor for m in model.modules() if hasattr(m, "processor")} == processors


def test_a_patched_model_is_tuned_for_its_kernel():
    model = video_model()
    with sage_plugin.patched(model, kernel="sage"):
        autotune(model)
    assert [entry.key.kernel for entry in load.read(CONFIGS).entries] == ["sage"]


def test_a_recording_is_tuned_where_configs_are_missing(tmp_path):
    folder = captures.write(tmp_path / "captured_inputs", [(SELF, (0, 1)), (GROUPED, (0, 1))])
    first = autotune(folder)
    assert set(first.tuned) == {SELF, GROUPED}
    assert autotune(str(folder)).tuned == ()


def test_progress_is_told_and_a_cancelled_call_goes_on_where_it_was(runner):
    told = []
    model = video_model()
    stopped = autotune(model, progress=told.append, cancelled=lambda: len(told) == 2)
    assert not stopped.complete
    assert [(p.study, p.studies, p.tried) for p in told] == [(1, 1, 1), (1, 1, 2)]
    assert told[1].best_ms is not None
    assert runner.closed
    done = autotune(model, progress=told.append)
    assert done.complete
    assert told[2].tried == 3


def test_experts_of_a_mixture_are_known_by_its_configuration(monkeypatch):
    pytest.importorskip("transformers")
    from tests.plugin.experts.mixtures import mixture

    wanted = []

    def tune(self, found, kernels, device):
        wanted.extend(
            (group.shape, self._wants(group.shape, "auto", H200)) for group in found.groups
        )
        return home.AutotuneReport((), (), None)

    monkeypatch.setattr(home._Asked, "tune", tune)
    model = mixture("qwen3_moe").to(torch.bfloat16)
    autotune(model, op="grouped_linear", seq_lens=[5, 40])
    shape = functools.partial(LinearShape, dtype="bfloat16", groups=6)
    expected = {shape(n * 3, *features) for n in (5, 40) for features in ((32, 96), (48, 32))}
    assert {one for one, _ in wanted} == expected
    assert all(wants for _, wants in wanted)
    with pytest.raises(UsageError, match="needs seq_lens"):
        autotune(model, op="grouped_linear")
    with pytest.raises(UsageError, match="give first_step"):
        autotune(model, op="linear")


def test_gpus_share_the_calls_and_each_tells_of_its_own(monkeypatch, tmp_path):
    folder = captures.write(tmp_path / "captured_inputs", [(SELF, (0, 1)), (GROUPED, (0, 1))])
    pair, before, pinned, told = (Gpu(0, "GPU-0"), Gpu(1, "GPU-1")), meeting(2), [], []

    def lane(gpu, **_):
        pinned.append(gpu)
        return ScriptedRunner(before=before)

    monkeypatch.setattr(device, "gpus", lambda: pair)
    monkeypatch.setattr(device, "facts", lambda _: CPU)
    monkeypatch.setattr(device, "chosen", lambda name: (torch.device(name), CPU))
    monkeypatch.setattr(subprocess_runner, "SubprocessRunner", lane)
    done = autotune(folder, gpus="all", progress=told.append)
    assert pinned == ["GPU-0", "GPU-1"]
    assert set(done.tuned) == {SELF, GROUPED}
    for number in (1, 2):
        tried = [p.tried for p in told if p.study == number]
        assert tried == [*range(1, len(tried) + 1)] != []
    with pytest.raises(UsageError, match="both say where"):
        autotune(folder, gpus="all", device="cpu")


def test_it_refuses_to_run_inside_of_a_request():
    class Server(nn.Module):
        def forward(self):
            return autotune(video_model())

    with pytest.raises(UsageError, match="call it between requests"):
        Server()()
    assert not CONFIGS.exists()


def test_a_model_that_does_not_tell_its_calls_is_named():
    with pytest.raises(UsageError, match="Linear has no configuration"):
        home.autotune(nn.Linear(2, 2), budget_s=1.0)
