"""Which cases come out of a folder, and what they load."""

from __future__ import annotations

import pytest

from sage_plugin.bench import suite
from sage_plugin.errors import CaptureError
from tests.bench.folders import write


def test_captures_are_named_and_limited(tmp_path):
    folder = write(tmp_path / "captures", count=4)
    assert len(suite.captured(folder).cases) == 4
    few = suite.captured(folder, 2)
    assert len(few.cases) == 2
    assert few.cases[0].name == "000000 transformer.blocks.0.attn step 0"
    assert few.cases[0].source == "capture"


def test_names_of_a_foreign_manifest_cannot_command_a_terminal(tmp_path):
    folder = write(tmp_path / "c")
    manifest = folder / "manifest.jsonl"
    line = manifest.read_text().replace("transformer.blocks.0", "a\\u001b[2Jb\\u202ec")
    manifest.write_text(line)
    (case,) = suite.captured(folder).cases
    assert case.record.layer == "a\x1b[2Jb\u202ec.attn"
    assert case.name == r"000000 a\x1b[2Jb\u202ec.attn step 0"


@pytest.mark.parametrize("make", ["missing", "empty", "foreign"])
def test_folders_that_hold_no_captures(tmp_path, make):
    folder = tmp_path / "captures"
    if make != "missing":
        folder.mkdir()
    if make == "foreign":
        (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CaptureError, match="sage capture"):
        suite.captured(folder)
