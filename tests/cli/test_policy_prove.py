"""`sage policy prove` on a short clip, and how each mistake is answered."""

from __future__ import annotations

import dataclasses
import json
import logging

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("diffusers")
pytest.importorskip("skimage")

from sage_plugin.cli import app
from sage_plugin.cli.policy import proof_table
from sage_plugin.cli.policy import prove as policy_prove
from sage_plugin.demo.sizes import SIZES
from sage_plugin.kernels.attention import dispatch
from tests.bench.clips.proofs import timed

FRAMES, STEPS, LAYERS = 8, 3, 4
SHORT = dataclasses.replace(SIZES["small"], frames=FRAMES)
FILES = {
    ".sage-policy-bench",
    "result.json",
    "plane.png",
    *(f"{clip}.{kind}" for clip in ("host", "policy", "side_by_side") for kind in ("gif", "png")),
}
RULES = [
    {"kernel": "sdpa", "steps": ":1"},
    {"kernel": "fav2", "layers": ["*blocks.0.*"]},
    {"kernel": "sage"},
]
FORESEEN = {
    "device": "H100",
    "steps": STEPS,
    "calls": STEPS * LAYERS,
    "ways": [
        {"way": "sdpa", "ms": 80.5, "error": 0.0},
        {"way": "sage", "ms": 50.25, "error": 0.03125},
        {"way": "policy", "ms": 60.5, "error": 0.015625},
    ],
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    """A short clip, and nothing from the user's environment."""
    for name in ("CONFIG_DIR", "KERNEL", "VARIANT", "LAUNCH", "DISABLE"):
        monkeypatch.delenv(f"SAGE_PLUGIN_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setitem(SIZES, "small", SHORT)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    dispatch.forget()
    yield
    dispatch.forget()
    root.handlers[:], root.level = handlers, level


def prove(*words: object):
    result = CliRunner().invoke(app, ["policy", "prove", *map(str, words)], env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def proof(*words: object):
    return prove("policy.json", "--kernel", "sage", *words)


def write_policy(path="policy.json", **more):
    with open(path, "w") as file:
        json.dump({"schema_version": 1, "rules": RULES, **more}, file)


def error_of(result):
    """The one sentence on stderr."""
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


def test_the_whole_path(tmp_path):
    write_policy(model="CogVideoXTransformer3DModel", prediction=FORESEEN)
    result = proof("--seed", 3)
    assert result.exit_code == 0, result.stderr
    out = tmp_path / "policy_bench"
    assert {path.name for path in out.iterdir()} == FILES
    for clip, width in (("host", 1), ("policy", 1), ("side_by_side", 3)):
        with Image.open(out / f"{clip}.gif") as film:
            assert film.n_frames == FRAMES
            assert film.size == (width * SHORT.width * 2, SHORT.height * 2)

    found = json.loads((out / "result.json").read_text())
    facts = [found[name] for name in ("policy", "size", "steps", "seed", "digits")]
    assert facts == ["policy.json", "small", STEPS, 3, [7]]  # the steps of the policy's search
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["sdpa", "sage", "policy"]
    assert rows["sdpa"]["mean_psnr_db"] == "inf"
    assert rows["sdpa"]["step_error"] == [0.0] * STEPS
    sage, ours = rows["sage"], rows["policy"]
    assert 20 < sage["min_psnr_db"] < sage["mean_psnr_db"] < ours["mean_psnr_db"] < 90
    assert 0 < sage["step_error"][0] < sage["step_error"][-1]
    assert ours["step_error"][0] == 0.0 < ours["step_error"][1] < ours["step_error"][2]
    assert len(ours["quality"]["psnr_db"]) == len(ours["quality"]["ssim"]) == FRAMES
    assert ours["ran"] == {
        "host: the policy's rule 1 leaves it to the host": LAYERS,
        "fav2:emulation": 2,
        "sage:emulation": 2 * (LAYERS - 1),
    }
    assert (ours["foreseen_ms"], ours["foreseen_saved_ms"]) == (60.5, 20.0)
    assert found["above_line_db"] is None

    lines = [line for line in result.stdout.splitlines() if line.startswith("policy ")]
    (line,) = (line for line in lines if "60.5" in line)
    assert line.split()[:4] == ["policy", "20.0", "60.5", "0.01562"]
    # A narrow terminal gets the columns in two tables.
    assert any(f"{2 * LAYERS} of {STEPS * LAYERS}" in line for line in lines)
    assert "emulation: not a speed" in result.stdout
    assert "foreseen on H100, and this is CPU" in result.stdout
    assert "Nothing was timed, since kernels are emulated on a CPU" in result.stdout
    assert result.stderr.splitlines()[-1].startswith("Next: ")


def test_all_kernels_of_the_device_by_default_and_steps_as_asked(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(policy_prove, "run", lambda *words: asked.append(words))
    words = ["--digit", 3, "--num-inference-steps", 2, "--budget", 5, "--out", "elsewhere"]
    assert prove("safe", *words).exit_code == 0
    ((policy, kernels, clips, budget_s, out),) = asked
    assert kernels == ("sdpa", "fav2", "sage", "fav3_sage", "fav3_fp8")
    assert (policy, clips.digits, clips.steps, budget_s) == ("safe", (3,), 2, 5.0)
    assert (clips.device.type, clips.size, out.name) == ("cpu", None, "elsewhere")


def test_without_matplotlib_the_plot_is_left_out_and_said(monkeypatch, tmp_path):
    monkeypatch.setattr("sage_plugin.bench.clips.plot.save", lambda *_: "no plane.png: why")
    write_policy()
    result = proof("--num-inference-steps", 1, "--out", "out")
    assert result.exit_code == 0
    assert "no plane.png: why" in result.stderr
    assert not (tmp_path / "out" / "plane.png").exists()
    assert (tmp_path / "out" / "result.json").exists()


def test_side_by_side_are_host_policy_and_their_difference(tmp_path):
    host = np.full((2, 8, 8, 1), 0.25, dtype=np.float32)
    clips = {"sdpa": host, "sage": host + 0.5, "policy": host - 0.2}
    policy_prove._save_clips(clips, tmp_path)
    with Image.open(tmp_path / "side_by_side.png") as sheet:
        column = [sheet.getpixel((4, y)) for y in (4, 20, 36)]
    assert column == [64, 13, 51]  # 0.25, 0.05 and 0.2 of 255


def shown(found, width):
    console = Console(width=width, file=None)
    with console.capture() as text:
        console.print(proof_table.render(found, width=width))
    return text.get()


def test_the_table_of_times():
    text = shown(timed(36.2), 160)
    (line,) = (x for x in text.splitlines() if x.startswith("policy") and "36.20" in x)
    cells = "policy 5.000 1.0% 20.0 17.0 7.0 0.25000 36.20 35.70 0.92500 0.90000 16 of 16"
    assert line.split() == cells.split()
    (line,) = (x for x in text.splitlines() if x.startswith("sage") and "40.00" in x)
    assert line.split()[:7] == ["sage", "6.000", "1.0%", "16.0", "-", "-", "-"]
    assert "timing: clean (A/A 1.002)" in text
    assert "median of 5 rounds" in text
    assert "emulation" not in text
    assert "The policy lies 1.2 dB above the line between single kernels." in text
    (line,) = (x for x in text.splitlines() if x.startswith("policy") and "1.6e-02" in x)
    assert line.split() == ["policy", "▅▆▆▇", "2.0e-03", "1.6e-02", "3"]


def test_in_a_narrow_terminal_the_quality_stands_below_the_times():
    text = shown(timed(), 80)
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    assert sum(line.startswith("way") for line in text.splitlines()) == 2


@pytest.mark.parametrize(
    ("psnr_db", "next_step"),
    [(36.0, "Next: sage_plugin.patch(pipe, policy='p')"), (34.0, "Next: sage policy search")],
)
def test_what_to_do_next(psnr_db, next_step):
    assert policy_prove._advice("p", policy_prove.FOLDER, timed(psnr_db)).startswith(next_step)


# -- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "Missing argument 'POLICY'"),
        (("fast", "--preset", "all"), "No such option"),
        (("no.json",), "neither a file nor one of fast, balanced, safe"),
        (
            ("wan.json",),
            "examples/cogvideo/compare.py --model ID --poli",
        ),
        (("far.json",), "rule 1 of the policy names no layer"),
        (
            ("fast", "--size", "huge"),
            "--size 'huge': allowed are small",
        ),
        (("fast", "--seed", "-1"), "--seed -1: must be from 0"),
        (("fast", "--kernel", "flash"), "kernel 'flash' is not known"),
        (("fast", "--kernel", "auto"), "--kernel auto: name the kern"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_made(tmp_path, words, said):
    write_policy("wan.json", model="WanTransformer3DModel")
    far = {"schema_version": 1, "rules": [{"kernel": "sage", "layers": ["*blocks.29.*"]}]}
    (tmp_path / "far.json").write_text(json.dumps(far))
    result = prove(*words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "policy_bench").exists()


def test_a_gpu_that_is_not_there_is_exit_code_3():
    result = prove("fast", "--device", "cuda")
    assert result.exit_code == 3
    assert "no GPU that torch can use" in error_of(result)


def test_a_foreign_folder_is_refused_and_left_as_it_is(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.txt").write_text("years of work")
    result = prove("safe", "--out", theirs)
    assert result.exit_code == 2
    assert (
        "is not the folder of an earlier `sage policy prove`: name another with --out"
        in error_of(result)
    )
    assert [path.name for path in theirs.iterdir()] == ["thesis.txt"]
