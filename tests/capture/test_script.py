"""Somebody's script, run in this process and recorded, whether it patches its model or not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch.nn.modules import module as torch_module

from sage_plugin.capture.recording.recorder import CaptureOptions, CaptureRecorder
from sage_plugin.capture.recording.script import check_script, run_script
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.errors import UsageError
from tests.capture.toys import LAYERS, SCRIPT


class Ran:
    """A script after its run."""

    def __init__(self, tmp_path: Path, text: str, *args: str, **options) -> None:
        script = tmp_path / "their_script.py"
        script.write_text(text)
        self.folder = tmp_path / "captures"
        self.recorder = CaptureRecorder(self.folder, CaptureOptions(**options))
        with self.recorder:
            self.end = run_script(script, args, self.recorder)
        self.summary = self.recorder.summary


def test_a_script_that_patches_nothing(tmp_path):
    ran = Ran(tmp_path, SCRIPT.format(patch="", end=""), "5", max_captures=50)
    assert ran.end.status == 0
    assert ran.summary.steps == {"transformer": 5}
    records = open_captures(ran.folder).records
    assert len(records) == 5 * LAYERS
    assert records[0].layer == "transformer.transformer_blocks.0.attn1"
    assert [r.timestep for r in records[::LAYERS]] == [900.0, 899.0, 898.0, 897.0, 896.0]
    assert {r.text_length for r in records} == {8}, "also of the forward that was noticed"


def test_a_script_that_patches(tmp_path):
    text = SCRIPT.format(
        patch="import sage_plugin; h = sage_plugin.patch(model, kernel='sage', min_seq=0)",
        end="assert h.report().kernel_calls() == 12, h.report().text()\nh.unpatch()",
    )
    ran = Ran(tmp_path, text, "4", max_captures=50)
    assert ran.end.traceback == ""
    assert ran.summary.files == 4 * LAYERS
    assert ran.summary.steps == {"transformer": 4}


OWN_PROCESSOR = """
import torch.nn.functional as F
calls, gain = 0, 1.0

class Own:
    def __call__(self, attn, hidden_states, encoder_hidden_states, **unused):
        global calls
        calls += 1
        x = torch.cat([encoder_hidden_states, hidden_states], 1)
        q, k, v = (
            f(x).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for f in (attn.to_q, attn.to_k, attn.to_v)
        )
        out = gain * F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        text = encoder_hidden_states.shape[1]
        self.largest = out.abs().max().item()
        return out[:, text:], out[:, :text]

own = Own()
model.set_attn_processor(own)
"""


def test_report_127_and_128_a_script_s_own_processor_keeps_its_globals_and_state(tmp_path):
    end = f"""
assert calls == 3 * {LAYERS}, calls
assert own.largest > 0
gain = 0.0
denoise(model, steps=1)
assert own.largest == 0, own.largest
"""
    ran = Ran(tmp_path, SCRIPT.format(patch=OWN_PROCESSOR, end=end), "3", max_captures=50)
    assert ran.end.traceback == ""
    assert ran.summary.files == 4 * LAYERS


def test_a_script_that_compares_unpatched_and_patched(tmp_path):
    text = SCRIPT.format(
        patch="denoise(model, steps=2)\nfrom sage_plugin import patch, patched",
        end=(
            "with patched(model, kernel='sage', min_seq=0) as h:\n"
            "    denoise(model, steps=3)\n"
            "assert h.report().kernel_calls() == 9\n"
            "denoise(model, steps=1)\n"
        ),
    )
    ran = Ran(tmp_path, text, "2", max_captures=100)
    assert ran.end.traceback == ""
    assert ran.summary.steps == {"transformer": 8}
    assert ran.summary.calls_seen == 8 * LAYERS
    assert ran.summary.files == 8 * LAYERS


def test_only_denoisers_are_touched(tmp_path):
    text = SCRIPT.format(
        patch=(
            "from tests.capture.toys import autoencoder, processors\n"
            "vae = autoencoder()\n"
            "before = processors(vae)\n"
            "vae(torch.zeros(1, 3, 8, 8))"
        ),
        end="assert before and processors(vae) == before",
    )
    ran = Ran(tmp_path, text)
    assert ran.end.traceback == ""
    assert set(ran.summary.steps) == {"transformer"}


def test_the_script_sees_what_python_would_show_it(tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    ran = Ran(
        tmp_path,
        "import sys, beside\n"
        "assert __name__ == '__main__' and beside.VALUE == 3\n"
        "assert sys.argv[1:] == ['--steps', '2', '-o', 'x', '--help'], sys.argv\n"
        "assert sys.argv[0] == __file__ and sys.path[0] == __file__.rsplit('/', 1)[0]\n",
        "--steps", "2", "-o", "x", "--help",
    )  # fmt: skip
    sys.modules.pop("beside", None)
    assert ran.end.traceback == ""
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("end", "status", "text"),
    [
        ("sys.exit()", 0, ""),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no prompt')", 1, "no prompt\n"),
    ],
)
def test_exits(tmp_path, end, status, text):
    ran = Ran(tmp_path, SCRIPT.format(patch="", end=end), "1")
    assert (ran.end.status, ran.end.traceback) == (status, text)
    assert ran.summary.files == LAYERS


def test_an_error_shows_the_frames_of_the_script_alone(tmp_path):
    ran = Ran(tmp_path, SCRIPT.format(patch="", end="raise KeyError('theirs')"), "2")
    assert ran.end.status == 1
    lines = ran.end.traceback.splitlines()
    assert lines[0].startswith("Traceback")
    assert "their_script.py" in lines[1]
    assert lines[-1] == "KeyError: 'theirs'"
    assert "sage_plugin" not in ran.end.traceback
    assert len(open_captures(ran.folder).records) == 2 * LAYERS


def test_a_script_that_is_no_python(tmp_path):
    ran = Ran(tmp_path, "this is no python\n")
    assert "SyntaxError" in ran.end.traceback
    assert not ran.folder.exists()


def test_no_hook_is_left_behind(tmp_path):
    before = len(torch_module._global_forward_pre_hooks)
    argv = list(sys.argv)
    for text in ("import torch\ntorch.nn.Linear(1, 1)(torch.ones(1))", "raise ValueError"):
        Ran(tmp_path, text)
    assert len(torch_module._global_forward_pre_hooks) == before
    assert sys.argv == argv


def test_models_without_attention_are_passed_over(tmp_path):
    ran = Ran(
        tmp_path,
        "import torch\n"
        "class ModelMixin: pass\n"
        "class MyTransformer(ModelMixin, torch.nn.Linear): pass\n"
        "MyTransformer(1, 1)(torch.ones(1))\n",
    )
    assert ran.end.traceback == ""
    assert ran.summary.steps == {}
    assert "no attention of a diffusers or transformers model" in ran.summary.why_nothing()


def test_a_compiled_model_is_named_as_the_reason(tmp_path):
    text = SCRIPT.format(patch="model.compile(backend='eager', fullgraph=True)", end="")
    ran = Ran(tmp_path, text, "1")
    torch.compiler.reset()
    assert ran.end.traceback == ""
    assert ran.summary.files == 0
    assert "torch.compile" in ran.summary.why_nothing()


def test_scripts_that_are_not_there(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        check_script(tmp_path / "missing.py")
    with pytest.raises(UsageError, match="is a folder"):
        check_script(tmp_path)
