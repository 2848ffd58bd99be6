"""The folder is whole at every moment; awkward tensors come back as they were."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from sage_plugin.capture.store import writer as writer_module
from sage_plugin.capture.store.manifest import COUNTS, MANIFEST, CallCounts, read_manifest
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.capture.store.writer import HEADER_KEY, LOCK, CaptureWriter
from sage_plugin.errors import CaptureError, OutputError
from tests.capture.toys import line, shape, tensors


def opened(folder, **options) -> CaptureWriter:
    writer = CaptureWriter(folder, **options)
    writer.open()
    return writer


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name != LOCK}


def test_a_capture_comes_back(tmp_path):
    writer = opened(tmp_path / "new" / "folder")
    record = writer.save(tensors(), line())
    writer.close(CallCounts(complete=True, layers={record.layer: 7}))
    captures = open_captures(writer.folder)
    assert captures.records == (record,)
    assert captures.problems == ()
    assert captures.counts == {record.layer: 7}
    call = captures.load(record)
    assert all(torch.equal(getattr(call, n), t) for n, t in tensors().items())
    assert call.key_bias is None
    assert call.attn_mask is None
    assert writer.total_bytes == (writer.folder / record.file).stat().st_size


@pytest.mark.parametrize(
    ("kind", "name", "size"),
    [("key_bias", "key_bias", (1, 1, 4)), ("dense", "attn_mask", (1, 2, 4, 4))],
)
def test_masks_come_back(tmp_path, kind, name, size):
    writer = opened(tmp_path / "c")
    mask = torch.rand(size)
    record = writer.save({**tensors(), name: mask}, line(shape=shape(mask_kind=kind)))
    writer.close(CallCounts())
    assert torch.equal(getattr(open_captures(tmp_path / "c").load(record), name), mask)


def test_fp8_comes_back(tmp_path):
    writer = opened(tmp_path / "c")
    eight = {n: t.to(torch.float8_e4m3fn) for n, t in tensors().items()}
    record = writer.save(eight, line(shape=shape(dtype="float8_e4m3fn")))
    call = open_captures(tmp_path / "c").load(record)
    assert call.v.dtype == torch.float8_e4m3fn
    assert torch.equal(call.v.view(torch.uint8), eight["v"].view(torch.uint8))


def test_a_file_says_by_itself_what_it_is(tmp_path):
    writer = opened(tmp_path / "c")
    record = writer.save(tensors(), line(layer="transformer.x"))
    with safe_open(tmp_path / "c" / record.file, framework="pt") as file:
        assert json.loads(file.metadata()[HEADER_KEY])["layer"] == "transformer.x"


def test_captures_are_as_readable_as_the_index(tmp_path):
    writer = opened(tmp_path / "c")
    record = writer.save(tensors(), line())
    modes = {stat.S_IMODE((tmp_path / "c" / n).stat().st_mode) for n in (record.file, MANIFEST)}
    assert len(modes) == 1


def test_a_capture_can_be_taken_back(tmp_path):
    writer = opened(tmp_path / "c")
    first, second = writer.save(tensors(), line()), writer.save(tensors(1), line(step=1))
    writer.delete(first)
    third = writer.save(tensors(2), line(step=2))
    assert names(tmp_path / "c") == {MANIFEST, second.file, third.file}
    assert open_captures(tmp_path / "c").records == (second, third)
    assert len({first.file, second.file, third.file}) == 3


def test_the_line_comes_after_the_file(tmp_path, monkeypatch):
    """G6: whatever dies, no line is without its file."""
    writer = opened(tmp_path / "c")
    seen = []

    def spy(folder, record):
        seen.append((folder / record.file).exists())

    monkeypatch.setattr(writer_module, "append_record", spy)
    writer.save(tensors(), line())
    assert seen == [True]


@pytest.mark.parametrize("failing", ["save_file", "append_record", "_hash"])
def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch, failing):
    writer = opened(tmp_path / "c")
    kept = writer.save(tensors(), line())

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer_module, failing, full)
    with pytest.raises(OutputError, match="No space left"):
        writer.save(tensors(1), line(step=1))
    assert names(tmp_path / "c") == {MANIFEST, kept.file}
    assert read_manifest(tmp_path / "c").problems == ()


def test_a_folder_without_captures_is_taken_back(tmp_path):
    opened(tmp_path / "c").close(CallCounts())
    assert not (tmp_path / "c").exists()
    (tmp_path / "mine").mkdir()
    opened(tmp_path / "mine").close(CallCounts())
    assert names(tmp_path / "mine") == set()


def test_captures_are_not_replaced_unasked(tmp_path):
    opened(tmp_path / "c").save(tensors(), line())
    before = names(tmp_path / "c")
    with pytest.raises(CaptureError, match=r"already holds 1 captures.*--overwrite"):
        opened(tmp_path / "c")
    assert names(tmp_path / "c") == before


def test_overwriting_deletes_what_the_manifest_lists_and_nothing_else(tmp_path):
    folder = tmp_path / "c"
    writer = opened(folder)
    old = writer.save(tensors(), line())
    writer.close(CallCounts())
    (folder / "notes.txt").write_text("mine")
    (folder / "other.safetensors").write_text("mine too")
    again = opened(folder, overwrite=True)
    assert (folder / old.file).exists(), "until there is something new"
    new = again.save(tensors(1), line(step=5))
    again.close(CallCounts(complete=True))
    assert open_captures(folder).records == (new,)
    assert {"notes.txt", "other.safetensors", MANIFEST, COUNTS, new.file} == names(folder)


def test_two_recordings_never_share_a_folder(tmp_path):
    first = opened(tmp_path / "c", overwrite=True)
    record = first.save(tensors(), line())
    for overwrite in (False, True):
        with pytest.raises(CaptureError, match="is being recorded into by another process"):
            opened(tmp_path / "c", overwrite=overwrite)
    first.close(CallCounts())
    assert open_captures(tmp_path / "c").records == (record,)
    opened(tmp_path / "c", overwrite=True).close(CallCounts())
    assert open_captures(tmp_path / "c").records == (record,)


@pytest.mark.parametrize("fails", ["rename", "manifest", "delete"])
def test_former_captures_stay_until_a_new_one_is_listed(tmp_path, monkeypatch, fails):
    folder = tmp_path / "c"
    writer = opened(folder)
    old = writer.save(tensors(), line())
    writer.close(CallCounts())
    again = opened(folder, overwrite=True)

    def fail(*arguments, **options):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        if fails == "rename":
            patch.setattr(os, "replace", fail)
        elif fails == "manifest":
            patch.setattr(writer_module, "write_manifest", fail)
        else:
            patch.setattr(Path, "unlink", fail)
        if fails == "delete":
            new = again.save(tensors(1), line(step=5))
        else:
            with pytest.raises(OutputError):
                again.save(tensors(1), line(step=5))
    listed = (new,) if fails == "delete" else (old,)
    assert open_captures(folder).records == listed
    again.close(CallCounts())
    last = opened(folder, overwrite=True)
    newest = last.save(tensors(2), line(step=6))
    last.close(CallCounts())
    assert names(folder) == {MANIFEST, COUNTS, newest.file}


def test_a_manifest_cannot_make_us_delete_other_files(tmp_path):
    folder = tmp_path / "c"
    victim = tmp_path / "victim.safetensors"
    victim.write_text("mine")
    opened(folder).save(tensors(), line())
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace("000000.safetensors", "../victim.safetensors"))
    opened(folder, overwrite=True).save(tensors(), line())
    assert victim.exists()


def test_overwriting_without_a_new_capture_keeps_the_old_ones(tmp_path):
    folder = tmp_path / "c"
    writer = opened(folder)
    old = writer.save(tensors(), line())
    writer.close(CallCounts(complete=True, layers={"a": 3}))
    again = opened(folder, overwrite=True)
    again.write_counts(CallCounts())
    again.close(CallCounts())
    captures = open_captures(folder)
    assert captures.records == (old,)
    assert captures.counts == {"a": 3}


def test_another_schema_is_not_overwritten(tmp_path):
    folder = tmp_path / "c"
    opened(folder).save(tensors(), line())
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"schema_version":1', '"schema_version":2'))
    with pytest.raises(CaptureError, match="schema version 2"):
        opened(folder, overwrite=True)


def test_a_foreign_folder_is_not_written_into(tmp_path):
    (tmp_path / "holiday.jpg").write_text("")
    for overwrite in (False, True):
        with pytest.raises(CaptureError, match=r"holiday\.jpg"):
            opened(tmp_path, overwrite=overwrite)
    assert names(tmp_path) == {"holiday.jpg"}


def test_places_that_cannot_be_written(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    names_of_none = ("x" * 300, "a\0b", "latin \udcff")
    for folder in (file, file / "below", *(tmp_path / name for name in names_of_none)):
        with pytest.raises(OutputError):
            opened(folder)
    assert names(tmp_path) == {"file"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission"):
        opened(tmp_path / "c")


def test_numbers_of_files_that_exist_are_passed_over(tmp_path):
    writer = opened(tmp_path / "c")
    (tmp_path / "c" / "000000.safetensors").write_text("left over")
    assert writer.save(tensors(), line()).file == "000001.safetensors"
