"""A script is run until its second forward, and what it would run on is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.nn.modules import module as torch_module

from sage_plugin.capture.recording.script_plan import plan_script
from sage_plugin.errors import UsageError
from sage_plugin.registry import lookup
from tests.capture.toys import LAYERS, SCRIPT
from tests.cli.program import error_of, sage
from tests.plugin.test_model_calls import WAN

PATCH = "import sage_plugin; sage_plugin.patch(model, kernel='sage', min_seq=0)"
TELL = "open('ended', 'w')"


def script(text: str) -> Path:
    path = Path("theirs.py")
    path.write_text(text)
    return path


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("patch", "kernel"), [(PATCH, "sage:emulation"), ("", "")])
def test_the_calls_of_the_first_forward_are_planned(patch, kernel):
    hooks = len(torch_module._global_forward_pre_hooks)
    plan = plan_script(script(SCRIPT.format(patch=patch, end=TELL)), ["5"])
    assert [row.layer for row in plan.rows] == [
        f"transformer.transformer_blocks.{i}.attn1" for i in range(LAYERS)
    ]
    assert {(row.kernel, row.shape.seq_q) for row in plan.rows} == {(kernel, 40)}
    assert not Path("ended").exists(), "the rest of the script did not run"
    assert len(torch_module._global_forward_pre_hooks) == hooks


def test_a_script_of_one_forward_runs_to_its_end():
    plan = plan_script(script(SCRIPT.format(patch=PATCH, end=TELL)), ["1"])
    assert len(plan.rows) == LAYERS
    assert Path("ended").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "no attention of a diffusers or transformers model ran in it"),
        ("raise ValueError('theirs')", "status 1: ValueError: theirs"),
    ],
)
def test_what_cannot_be_planned_is_said(text, says):
    with pytest.raises(UsageError, match=says):
        plan_script(script(text))


def test_the_doctor_plans_scripts_and_models():
    script(SCRIPT.format(patch=PATCH, end=""))
    done = sage("doctor", "--plan", "theirs.py 3")
    assert done.exit_code == 0, done.stderr
    assert "3 of 3 calls go to a kernel" in done.stdout
    layers = "transformer.transformer_blocks.*.attn1, 3 layers"
    assert f"{layers}: 2x2 heads of 16, 40 tokens" in done.stdout
    assert "Next: sage capture theirs.py 3" in done.stdout
    Path("wan").mkdir()
    Path("wan/config.json").write_text(json.dumps(WAN))
    model = sage("doctor --plan wan --as nvidia-h200")
    assert model.exit_code == 0, model.stderr
    assert "plan for NVIDIA H200: 30 of 60 calls go to a kernel" in model.stdout
    assert "self.*, 30 layers: 1x12 heads of 128, 32,760 tokens" in model.stdout
    assert "no config.json" in error_of(sage("doctor --plan absent"))
    assert "--seq-len is of a model" in error_of(sage("doctor --seq-len 64"))
    assert "No closing quotation" in error_of(sage("doctor", "--plan", "x.py 'a"))
    assert "runs here" in error_of(sage("doctor --plan theirs.py --as nvidia-h200"))


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 2,
    "max_position_embeddings": 65536, "intermediate_size": 512, "vocab_size": 99,
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--seq-len 64", "nothing to tune; the reasons say why"),
        ("--seq-len 32768 --as nvidia-h200", "your pipeline; sage_plugin.patch(pipe) uses"),
        (
            "--seq-len 32768 --as nvidia-h100",
            "sage tune --model 'my model' --seq-len 32768 on that card, for the calls",
        ),
    ],
)
def test_what_is_next_follows_from_the_plan(tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    Path("my model").mkdir()
    Path("my model/config.json").write_text(json.dumps(LLAMA))
    if "h100" in words:
        monkeypatch.setattr(lookup, "find", lambda *_, **__: None)
    done = sage(f"doctor --plan \"'my model'\" {words}")
    assert done.exit_code == 0, done.stderr
    assert f"Next: {told}" in done.stdout
