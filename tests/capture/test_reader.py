"""A capture folder may come from anywhere: damage and malice end in one clear sentence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sage_plugin.capture.call import canonical
from sage_plugin.capture.selection.extract import extract
from sage_plugin.capture.selection.heads import Part
from sage_plugin.capture.store.manifest import COUNTS, MANIFEST, CallCounts
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.capture.store.writer import CaptureWriter
from sage_plugin.errors import CaptureError
from sage_plugin.kernels.attention.mask import mask_kind
from tests.capture.toys import event, line, shape, tensors


@pytest.fixture
def folder(tmp_path) -> Path:
    """A sound folder of two captures."""
    writer = CaptureWriter(tmp_path / "captures")
    writer.open()
    for step in range(2):
        writer.save(tensors(step), line(step=step))
    writer.close(CallCounts(complete=True, layers={"a": 9}, steps={"transformer": 3}))
    return writer.folder


def rewritten(folder: Path, number: int, **changes) -> None:
    """Change fields of a manifest line; a dotted name reaches into the shape."""
    lines = (folder / MANIFEST).read_text().splitlines()
    data = json.loads(lines[number])
    for name, value in changes.items():
        if name in data["shape"]:
            data["shape"][name] = value
        else:
            data[name] = value
    lines[number] = json.dumps(data)
    (folder / MANIFEST).write_text("\n".join(lines) + "\n")


def one_left(folder: Path) -> str:
    """The only problem; the other capture is still readable."""
    captures = open_captures(folder)
    assert len(captures.records) == 1
    assert captures.load(captures.records[0]).q.shape == (1, 2, 4, 8)
    assert len(captures.problems) == 1
    return captures.problems[0]


def test_a_sound_folder(folder):
    captures = open_captures(str(folder))
    assert [record.step for record in captures.records] == [0, 1]
    assert captures.problems == ()
    assert captures.call_counts.steps == {"transformer": 3}
    assert captures.call_counts.complete
    assert captures.load(captures.records[0]).mask is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "nowhere does not exist: .*sage capture"),
        ("empty", "is empty"),
        ("foreign", r"holds holiday\.jpg but no manifest\.jsonl"),
        ("foreign/holiday.jpg", "is a file"),
    ],
)
def test_what_is_not_a_capture_folder_is_told(tmp_path, name, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "holiday.jpg").write_text("")
    with pytest.raises(CaptureError, match=says):
        open_captures(tmp_path / name)


MASKS = {
    "padding": torch.tensor([True, True, False, True]).view(1, 1, 1, 4),
    "bias": torch.tensor([0.5, 0.0, -torch.inf, -1e4]).view(1, 1, 1, 4),
    "half dense": torch.randn(1, 2, 4, 4).half(),
    "dense": torch.rand(1, 1, 4, 4) > 0.5,
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_comes_back_as_kernels_take_it(tmp_path, name):
    mask, q = MASKS[name], torch.randn(1, 2, 4, 8)
    call = canonical(event(q, mask=mask))
    writer = CaptureWriter(tmp_path / "c")
    writer.open()
    writer.save(extract(call, Part((0,), (0, 1))), line(shape=call.shape))
    writer.close(CallCounts())
    captures = open_captures(tmp_path / "c")
    found = captures.load(captures.records[0])
    assert found.mask.dtype == mask.dtype
    assert torch.equal(found.mask, mask)
    assert mask_kind(found.mask) == captures.records[0].shape.mask_kind


def test_a_mask_of_fp64_is_fp32_to_kernels(tmp_path):
    mask = torch.randn(1, 1, 4, 4).double()
    writer = CaptureWriter(tmp_path / "c")
    writer.open()
    writer.save(tensors() | {"attn_mask": mask}, line(shape=shape(mask_kind="dense")))
    writer.close(CallCounts())
    captures = open_captures(tmp_path / "c")
    assert torch.equal(captures.load(captures.records[0]).mask, mask.float())


@pytest.mark.parametrize("name", ["key_bias", "attn_mask"])
def test_a_mask_of_a_foreign_type_is_refused(tmp_path, name):
    kind, size = ("key_bias", (1, 1, 4)) if name == "key_bias" else ("dense", (1, 1, 4, 4))
    writer = CaptureWriter(tmp_path / "c")
    writer.open()
    mask = torch.zeros(size, dtype=torch.int32)
    writer.save(tensors() | {name: mask}, line(shape=shape(mask_kind=kind)))
    writer.close(CallCounts())
    with pytest.raises(CaptureError, match="holds a mask of I32"):
        open_captures(tmp_path / "c")


def test_damage_is_told_without_loading(folder):
    captures = open_captures(folder)
    path = folder / captures.records[1].file
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert captures.damage(captures.records[0]) is None
    expected = "000001.safetensors does not match its checksum: damaged"
    assert captures.damage(captures.records[1]) == expected
    with pytest.raises(CaptureError, match="does not match its checksum"):
        captures.load(captures.records[1])
    path.unlink()
    assert "cannot be read" in captures.damage(captures.records[1])


def test_what_a_foreign_folder_says_cannot_command_a_terminal(folder):
    """Names of files, tensors and fields come from the folder and are printed."""
    (folder / "x\x1b[2J.safetensors.tmp").write_text("")
    save_file(tensors() | {"\x1b]0;q\x07": tensors()["q"]}, folder / "000001.safetensors")
    problems = open_captures(folder).problems
    assert len(problems) == 2
    assert all(problem.isprintable() for problem in problems)
    assert r"x\x1b[2J" in " ".join(problems)
    (folder / MANIFEST).unlink()
    (folder / "000000.safetensors").rename(folder / "0\x1b[5m")
    with pytest.raises(CaptureError, match=r"holds 0\\x1b\[5m, ") as caught:
        open_captures(folder)
    assert str(caught.value).isprintable()


def test_an_empty_manifest(folder):
    (folder / MANIFEST).write_text("")
    with pytest.raises(CaptureError, match="no usable capture"):
        open_captures(folder)


@pytest.mark.parametrize("version", [0, 2, 99])
def test_another_schema_version(folder, version):
    rewritten(folder, 1, schema_version=version)
    with pytest.raises(CaptureError, match=rf"schema version {version} and this .* reads 1"):
        open_captures(folder)


def test_a_line_that_was_cut_short(folder):
    """G6: killed while the line was written."""
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text[:-40])
    captures = open_captures(folder)
    assert len(captures.records) == 1
    assert any("line 2 was cut short" in problem for problem in captures.problems)
    assert any("000001.safetensors is in no manifest line" in p for p in captures.problems)


def test_a_file_that_was_cut_short(folder):
    """G6: killed while the tensors were written."""
    whole = (folder / "000001.safetensors").read_bytes()
    for size in (0, 7, 100, len(whole) - 1):
        (folder / "000001.safetensors").write_bytes(whole[:size])
        assert "000001.safetensors is damaged" in one_left(folder)


def test_left_overs_of_an_interrupted_write(folder):
    shutil.copy(folder / "000000.safetensors", folder / "000002.safetensors")
    (folder / "000003.safetensors.tmp").write_text("")
    captures = open_captures(folder)
    assert len(captures.records) == 2
    assert [p.split()[0] for p in captures.problems] == [
        "000002.safetensors",
        "000003.safetensors.tmp",
    ]


def test_a_file_that_went_away_after_opening(folder):
    captures = open_captures(folder)
    (folder / "000000.safetensors").unlink()
    with pytest.raises(CaptureError, match="missing"):
        captures.load(captures.records[0])


def test_all_files_damaged(folder):
    for name in ("000000", "000001"):
        (folder / f"{name}.safetensors").write_text("")
    with pytest.raises(CaptureError, match="no usable capture"):
        open_captures(folder)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/passwd", "a/b.safetensors", ".x.safetensors", "x.pt", "", "x\0",
     "..", "C:\\x.safetensors"],
)  # fmt: skip
def test_names_that_lead_out_of_the_folder(folder, name):
    shutil.copy(folder / "000001.safetensors", folder.parent / "x.safetensors")
    rewritten(folder, 1, file=name)
    captures = open_captures(folder)
    assert len(captures.records) == 1
    assert any("not a plain file name" in problem for problem in captures.problems)


def test_links_that_lead_out_of_the_folder(folder):
    path = folder / "000001.safetensors"
    shutil.move(path, folder.parent / "x.safetensors")
    path.symlink_to(folder.parent / "x.safetensors")
    assert "link that leads out" in one_left(folder)
    path.unlink()
    path.symlink_to(path)
    assert len(open_captures(folder).records) == 1


def test_a_pipe_instead_of_a_file(folder):
    (folder / "000001.safetensors").unlink()
    os.mkfifo(folder / "000001.safetensors")
    assert "not a regular file" in one_left(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_q": 5},
        {"heads_q": 4},
        {"heads_k": 1},
        {"head_dim": -8},
        {"batch": 0},
        {"dtype": "float16"},
        {"dtype": "no such"},
        {"layout": "sideways"},
        {"mask_kind": "dense"},
        {"mask_kind": "strange"},
        {"scale": float("nan")},
        {"seq_k": 2**62},
        {"batch_indices": [1]},
        {"batch_indices": []},
        {"head_indices": [1, 0]},
        {"head_indices": [0, 0]},
        {"head_indices": [0, 2]},
        {"head_indices": "01"},
        {"family": "paged_attention"},
        {"layer": 3},
        {"surprise": 1},
    ],
)
def test_a_line_that_does_not_fit_its_file(folder, changes):
    rewritten(folder, 1, **changes)
    captures = open_captures(folder)
    assert len(captures.records) == 1
    assert captures.problems


def test_a_file_listed_twice(folder):
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text + text.splitlines(keepends=True)[0])
    captures = open_captures(folder)
    assert len(captures.records) == 2
    assert "listed twice" in captures.problems[0]


def test_tensors_of_other_names_or_types(folder):
    extra = {**tensors(), "surprise": tensors()["q"]}
    for found in (extra, {"q": tensors()["q"]}, {n: t.long() for n, t in tensors().items()}):
        save_file(found, folder / "000001.safetensors")
        assert "000001.safetensors" in one_left(folder)


@pytest.mark.parametrize("text", [None, "", "{}x", "[1]", '{"layers": 3}', '{"schema_version": 9}'])
def test_damaged_counts_cost_only_the_counts(folder, text):
    (folder / COUNTS).unlink() if text is None else (folder / COUNTS).write_text(text)
    captures = open_captures(folder)
    assert len(captures.records) == 2
    assert captures.counts == {}
    assert "call counts are unknown" in captures.problems[0]


def test_deeply_nested_json(folder):
    with open(folder / MANIFEST, "a") as file:
        file.write("[" * 100_000 + "\n")
    assert len(open_captures(folder).records) == 2
