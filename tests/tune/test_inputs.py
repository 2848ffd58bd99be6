"""Captures are grouped by call key; shapes become marked synthetic inputs."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from sage_plugin.errors import CaptureError
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.tune.configs.inputs import from_captures, from_drawn
from tests.tune import captures
from tests.tune.captures import GROUPED, SELF


def test_one_group_per_call_key_the_most_expensive_first(tmp_path):
    folder = captures.write(tmp_path / "c", [(GROUPED, (0,)), (SELF, (0,)), (SELF, (0, 1, 2, 3))])
    inputs = from_captures(folder)
    assert [group.shape for group in inputs.groups] == [SELF, GROUPED]
    assert [len(group.sources) for group in inputs.groups] == [2, 1]
    assert [group.calls for group in inputs.groups] == [2 * captures.CALLS, captures.CALLS]
    assert inputs.notes == ()
    assert all(source.label.startswith("sha256:") for source in inputs.groups[0].sources)


def test_calls_that_differ_in_batch_and_heads_alone_share_a_key_where_the_product_is_equal(
    tmp_path,
):
    halved = dataclasses.replace(SELF, batch=2, heads_q=2, heads_k=2)
    folder = captures.write(tmp_path / "c", [(SELF, (0,)), (halved, (0,))])
    assert len(from_captures(folder).groups) == 1


def test_the_timed_capture_is_the_one_of_median_size(tmp_path):
    heads = [(0, 1, 2, 3), (0,), (0, 1)]
    folder = captures.write(tmp_path / "c", [(SELF, saved) for saved in heads])
    (group,) = from_captures(folder).groups
    assert group.timed.saved_shape.heads_q == 2


def test_at_most_so_many_captures_of_a_key(tmp_path):
    folder = captures.write(tmp_path / "c", [(SELF, (0,))] * 6)
    assert len(from_captures(folder, max_per_key=2).groups[0].sources) == 2


def test_saved_shape_counts_the_query_heads_of_the_saved_key_heads(tmp_path):
    folder = captures.write(tmp_path / "c", [(GROUPED, (1,))])
    part = from_captures(folder).groups[0].timed.saved_shape
    assert (part.heads_k, part.heads_q) == (1, 2)


def test_a_damaged_capture_is_a_note(tmp_path):
    folder = captures.write(tmp_path / "c", [(SELF, (0,)), (SELF, (1,))])
    (folder / "000001.safetensors").write_bytes(b"")
    inputs = from_captures(folder)
    assert len(inputs.groups[0].sources) == 1
    assert "000001" in inputs.notes[0]


def test_captures_with_changed_contents_are_left_out_counted_and_replaced(tmp_path):
    saved = [(SELF, (head,)) for head in range(4)] + [(GROUPED, (0,))]
    folder = captures.write(tmp_path / "c", saved)
    for number in (0, 1, 2):
        captures.damage(folder, number)
    inputs = from_captures(folder, max_per_key=1)
    assert [group.shape for group in inputs.groups] == [SELF, GROUPED]
    (source,) = inputs.groups[0].sources
    assert source.record.file == "000003.safetensors"
    (note,) = inputs.notes
    assert note.startswith("3 captures are damaged and left out: ")
    assert all(f"00000{number}.safetensors does not match" in note for number in (0, 1, 2))


def test_a_call_without_a_sound_capture_is_left_out_and_all_of_them_are_an_error(tmp_path):
    folder = captures.write(tmp_path / "c", [(SELF, (0,)), (GROUPED, (0,))])
    captures.damage(folder, 1)
    inputs = from_captures(folder)
    assert [group.shape for group in inputs.groups] == [SELF]
    assert inputs.notes == (
        "000001.safetensors does not match its checksum: damaged; it is left out",
        "1 calls have no sound capture and are not tuned",
    )
    captures.damage(folder, 0)
    with pytest.raises(CaptureError, match="no capture is sound: 2 captures are damaged"):
        from_captures(folder)


def test_no_capture_is_an_error_that_names_the_place(tmp_path):
    with pytest.raises(CaptureError, match="absent"):
        from_captures(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CaptureError, match="empty"):
        from_captures(tmp_path / "empty")


def test_where_the_folder_lies_does_not_matter_but_its_contents_do(tmp_path):
    folder = captures.write(tmp_path / "c", [(SELF, (0,))])
    shutil.copytree(folder, tmp_path / "moved")
    labels = [
        s.label for f in (folder, tmp_path / "moved") for s in from_captures(f).groups[0].sources
    ]
    assert labels[0] == labels[1]


def test_synthetic_inputs_say_so(tmp_path):
    other = dataclasses.replace(SELF, seq_q=4096, seq_k=4096)
    inputs = from_drawn(
        ReplayInputs(shape, distribution="drift", seed=3) for shape in (SELF, other, SELF)
    )
    assert [group.shape for group in inputs.groups] == [other, SELF]
    (source,) = inputs.groups[0].sources
    assert source.synthetic
    assert source.label == "synthetic:drift:3"
    assert source.saved_shape == other
