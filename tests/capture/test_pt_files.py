"""Pickled captures are taken over as tensors and plain values, and run nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from sage_plugin.capture.recording.pt_files import convert
from sage_plugin.capture.selection.options import CaptureOptions
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.errors import CaptureError
from tests.cli.program import error_of, sage


def drawn(heads=4, seq=6, width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(1, heads, seq, width, generator=generator).half() for n in "qkv"}


def save(folder: Path, name: str, content: object) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / name)
    return folder


class Harmful:
    """What a pickle can hold: a call of any function when it is read."""

    def __reduce__(self):
        return Path.touch, (Path("ran"),)


def test_tensors_come_over_bit_for_bit_with_what_is_said_of_them(tmp_path):
    pt = tmp_path / "pt"
    first = drawn()
    save(pt, "sageattn_input_0.pt", {**first, "kwargs": {"is_causal": True, "scale": 0.5}})
    packed = {n: t.transpose(1, 2) for n, t in drawn(seed=1).items()}
    named = dict(zip(("query", "key", "value"), packed.values(), strict=True))
    mask = torch.arange(6).expand(1, 1, 1, 6) < 4
    save(pt, "sageattn_input_10.pt", {**named, "layout": "bshd", "attn_mask": mask})
    save(pt, "sageattn_metadata.pt", {"model": "CogVideoX"})
    done = convert(pt, tmp_path / "out", CaptureOptions())
    assert (done.found, done.problems) == (2, ())
    folder = open_captures(tmp_path / "out")
    assert folder.problems == ()
    one, two = (folder.load(record) for record in folder.records)
    assert all(torch.equal(getattr(one, name), tensor) for name, tensor in first.items())
    shape = one.record.shape
    assert (shape.causal, shape.scale, shape.layout, shape.dtype) == (True, 0.5, "bhsd", "float16")
    assert (one.record.layer, one.record.step, two.record.step) == ("pt.sageattn", 0, 1)
    assert torch.equal(two.v, packed["v"].transpose(1, 2))
    assert (two.record.shape.layout, two.record.shape.mask_kind) == ("bshd", "key_bias")
    assert two.record.shape.scale == 8**-0.5
    assert [count.calls for count in folder.call_counts.shapes] == [1, 1]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            {**drawn(), "kwargs": Harmful()},
            "plain values alone (it holds something else, or is damaged; nothing of it was run)",
        ),
        ([1, 2], "holds a list, expected a dict"),
        ({"q": drawn()["q"]}, "holds no tensor k"),
        ({**drawn(), "v": 5}, "holds no tensor v"),
        ({**drawn(), "k": torch.zeros(3)}, "not three 4-D tensors"),
        ({**drawn(), "k": drawn(heads=3)["k"]}, "do not form attention"),
        ({**drawn(), "scale": "big"}, "its scale is 'big'"),
        ({**drawn(), "attn_mask": 1}, "its attn_mask is int"),
        ({**drawn(), "attn_mask": torch.zeros(5, 5)}, "mask that does not broadcast"),
        ({**drawn(), "layout": "sbhd"}, "its layout is 'sbhd'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_taken_over_is_left_out_by_name(tmp_path, monkeypatch, content, says):
    monkeypatch.chdir(tmp_path)
    pt = save(Path("pt"), "x_input_1.pt", content)
    with pytest.raises(CaptureError, match=r"x_input_1\.pt: .*" + re.escape(says)):
        convert(pt, Path("out"), CaptureOptions())
    assert not Path("out").exists()
    save(pt, "x_input_2.pt", drawn())
    assert len(convert(pt, Path("out"), CaptureOptions()).problems) == 1
    assert not Path("ran").exists(), "code of a file was run"


def test_no_more_than_asked_for_and_parts_of_large_ones(tmp_path):
    pt = tmp_path / "pt"
    for number in range(9):
        save(pt, f"a_input_{number}.pt", drawn(seed=number))
    done = convert(pt, tmp_path / "out", CaptureOptions(max_captures=3, heads=2))
    assert [len(record.head_indices) for record in done.records] == [2, 2, 2]
    middle = open_captures(tmp_path / "out").load(done.records[1])
    assert torch.equal(middle.q, drawn(seed=4)["q"][:, [1, 3]])
    for folder, says in (
        (tmp_path / "none", "is not a folder"),
        (tmp_path / "out", "no .pt files"),
    ):
        with pytest.raises(CaptureError, match=says):
            convert(folder, tmp_path / "again", CaptureOptions())


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(Path("pt"), "a_input_0.pt", {n: t.transpose(1, 2) for n, t in drawn().items()})
    save(Path("pt"), "b_input_0.pt", {"q": 1})
    done = sage("capture --from-pt pt --out taken --layout bshd")
    assert done.exit_code == 0, done.stderr
    assert "Took over 1 of 2 files into taken" in done.stdout
    assert "left out: b_input_0.pt: holds no tensor q" in done.stderr
    (record,) = open_captures("taken").records
    assert (record.shape.heads_q, record.shape.layout) == (4, "bshd")
    assert sage("capture --from-pt pt --out taken").exit_code == 2
    for wrong in ("x.py", "--every 2", "--num-steps 3", "--layers a", "--size small"):
        refused = sage(f"capture --from-pt pt --out other {wrong}")
        assert "runs nothing: leave" in error_of(refused), wrong
    assert "--layout is of --from-pt" in error_of(sage("capture --layout bshd"))
