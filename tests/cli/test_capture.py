"""`sage capture` as a user types it: what comes out, and what each mistake answers."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch
from click.testing import Result

from sage_plugin import demo
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.cli import capture
from sage_plugin.demo.sizes import SIZES
from tests.capture.toys import LAYERS, SCRIPT, denoise, video_model
from tests.cli.program import error_of, sage


def record(*words: object) -> Result:
    return sage("capture", *words)


@pytest.fixture
def script(tmp_path):
    def write(patch: str = "", end: str = "") -> Path:
        path = tmp_path / "theirs.py"
        path.write_text(SCRIPT.format(patch=patch, end=end))
        return path

    return write


@pytest.fixture
def out(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "captured_inputs"


class DemoPipe:
    """Stands for the embedded pipeline: its model, called as it is called."""

    def __init__(self) -> None:
        self.transformer = video_model()
        self.components = {"transformer": self.transformer}
        self.size = ""

    def set_progress_bar_config(self, **_options) -> None:
        pass

    def __call__(self, digit, *, size, num_inference_steps, generator, callback_on_step_end):
        self.size = size
        for step in range(num_inference_steps):
            denoise(self.transformer, steps=1, start=900 - step)
            callback_on_step_end(self, step, 900 - step, {})


@pytest.fixture
def demo_pipe(monkeypatch) -> DemoPipe:
    pipe = DemoPipe()
    monkeypatch.setattr(demo, "load_pipeline", lambda **_: pipe, raising=False)
    return pipe


def test_bare_capture_records_the_demo(out, demo_pipe):
    answer = record("--max-captures", 4)
    assert answer.exit_code == 0, answer.stderr
    steps = SIZES[demo_pipe.size].default_steps
    assert demo_pipe.size == ("large" if torch.cuda.is_available() else "small")
    captures = open_captures(out)
    assert len(captures.records) == 4
    assert captures.call_counts.steps == {"transformer": steps}
    lines = answer.stdout.splitlines()
    assert (
        f"Recorded 4 captures (0.1 MB) in captured_inputs: 3 of 3 layers, 4 of {steps}" in lines[0]
    )
    assert f"{steps * LAYERS} attention calls" in lines[1]
    assert lines[-1] == "Next: sage tune captured_inputs"


def test_the_demo_takes_size_steps_and_folder(out, demo_pipe):
    answer = record(
        "--size", "large", "--num-steps", 2, "-o", "elsewhere/deep", "--max-captures", 3
    )
    assert answer.exit_code == 0, answer.stderr
    assert demo_pipe.size == "large"
    assert len(open_captures(out.parent / "elsewhere" / "deep").records) == 3
    assert not out.exists()


@pytest.mark.parametrize(
    "patch", ["", "import sage_plugin; sage_plugin.patch(model, kernel='sdpa')"]
)
def test_a_script_with_its_own_options(out, script, patch, caplog):
    caplog.set_level(logging.INFO)
    end = "assert sys.argv[2:] == ['--size', 'huge', '-o', 'x', '--help']\nprint('their output')"
    own = (6, "--size", "huge", "-o", "x", "--help")
    answer = record("--max-captures", 4, "--num-steps", 6, script(patch, end), *own)
    assert answer.exit_code == 0, answer.stderr
    assert "their output" in answer.stdout
    captures = open_captures(out)
    assert len(captures.records) == 4
    assert captures.call_counts.layers == {
        f"transformer.transformer_blocks.{i}.attn1": 6 for i in range(LAYERS)
    }
    saved = [r.message for r in caplog.records if r.message.startswith("saved")]
    assert len(saved) == 5, "the first call stands in until a planned one comes"


def test_options_behind_the_script_get_a_hint(out, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("import argparse; argparse.ArgumentParser().parse_args()")
    answer = record("-o", "x", mine, "--max-captures", "3", "--mine=1")
    assert answer.exit_code == 2
    assert "note: --max-captures stands behind" in answer.stderr
    assert f"sage capture --max-captures ... {mine}" in answer.stderr
    mine.write_text("import sys; assert '--max-captures' in sys.argv")
    assert "stands behind" not in record("-o", "x", mine, "--max-captures", "3").stderr
    mine.write_text("import sys; assert sys.argv[1:]")
    assert "stands behind" in record("-o", "x", mine, "--max-captures", "3").stderr


LANGUAGE_SCRIPT = """
import sys
sys.modules.pop("diffusers.pipelines.pipeline_utils", None)
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)
with torch.no_grad():
    LlamaForCausalLM._from_config(config).eval()(torch.randint(1, 64, (1, 12)))
"""


def test_a_language_model_is_recorded_from_a_script(out, tmp_path, monkeypatch):
    pipelines = "diffusers.pipelines.pipeline_utils"
    if pipelines in sys.modules:
        monkeypatch.delitem(sys.modules, pipelines)
    mine = tmp_path / "mine.py"
    mine.write_text(LANGUAGE_SCRIPT)
    answer = record("-o", "x", mine)
    assert answer.exit_code == 0, answer.stderr
    records = open_captures("x").records
    assert {r.shape.seq_q for r in records} == {12}
    assert {(r.shape.heads_q, r.shape.heads_k) for r in records} == {(4, 2)}
    assert {r.layer for r in records} == {f"model.model.layers.{i}.self_attn" for i in (0, 1)}


def test_filters_reach_the_recorder(out, script):
    answer = record(
        "--layers", "*.0.*,*.1.*", "--layers", "*.2.nothing", "--steps", "1-2", "--heads", "1,",
        "--batch", "0", "--max-captures", 50, script(),
    )  # fmt: skip
    assert answer.exit_code == 0, answer.stderr
    records = open_captures(out).records
    assert len(records) == 4
    assert {(r.step, r.head_indices, r.batch_indices) for r in records} == {
        (1, (1,), (0,)),
        (2, (1,), (0,)),
    }
    assert "Captures hold 1 of 2 key heads and 1 of 2 batch items: " in answer.stdout


def test_zero_records_exit_2_with_what_was_seen(out, script):
    """H4: the message names the calls that were there and the filter that took none of them."""
    answer = record("--layers", "wrong.*", "--steps", "1", script())
    assert answer.exit_code == 2
    assert f"{4 * LAYERS} attention calls of {LAYERS} layers" in error_of(answer)
    assert "transformer.transformer_blocks.0.attn1" in error_of(answer)
    assert "layer not selected" in error_of(answer)
    assert "'wrong.*', steps 1" in error_of(answer)
    assert not out.exists()


def test_a_script_without_a_denoiser(out, tmp_path):
    (tmp_path / "other.py").write_text("print('hello')")
    answer = record(tmp_path / "other.py")
    assert answer.exit_code == 2
    assert "no attention of a diffusers or transformers model ran" in error_of(answer)
    assert not out.exists()


def test_a_failing_script_keeps_its_captures(out, script):
    answer = record(script(end="raise ValueError('theirs')"), 2)
    assert answer.exit_code == 1
    assert "ValueError: theirs\nerror: " in answer.stderr
    assert "failed by itself" in error_of(answer)
    assert f"{2 * LAYERS} captures in captured_inputs" in error_of(answer)
    assert len(open_captures(out).records) == 2 * LAYERS


def test_a_script_that_fails_before_anything(out, script):
    answer = record(script(patch="sys.exit(7)"))
    assert answer.exit_code == 2
    assert "failed by itself (status 7)" in error_of(answer)
    assert not out.exists()


def test_a_capture_folder_is_replaced_only_on_demand(out, script):
    assert record(script()).exit_code == 0
    before = open_captures(out).records
    again = record(script())
    assert again.exit_code == 2
    assert "--overwrite" in error_of(again)
    assert open_captures(out).records == before
    assert record("--overwrite", "--max-captures", 2, script()).exit_code == 0
    assert len(open_captures(out).records) == 2


def test_ctrl_c_keeps_the_captures(out, script):
    with pytest.raises(KeyboardInterrupt):
        capture.command(script=script(end="raise KeyboardInterrupt"), args=["1"])
    captures = open_captures(out)
    assert len(captures.records) == LAYERS
    assert captures.call_counts.complete


def test_progress_does_not_reach_stdout(out, script):
    answer = record(script(), 2)
    first = [line.split()[0] for line in answer.stdout.splitlines()]
    assert first == ["Recorded", "Counted", "Next:"]
