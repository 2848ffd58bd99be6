"""A figure is saved whole, or there is a sentence, or an error that names the file."""

import struct
import sys

import pytest

from sage_plugin.errors import OutputError
from sage_plugin.measure import figure


def line(empty):
    empty.subplots().plot([0, 1], [0, 1])


def test_a_png_of_the_size_that_was_asked_for(tmp_path):
    path = tmp_path / "new" / "plot.png"
    assert figure.save(line, path, width=4.0, height=2.0) == ""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (600, 300)
    assert [entry.name for entry in path.parent.iterdir()] == ["plot.png"]


def test_without_matplotlib_there_is_a_sentence_and_no_file(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    note = figure.save(line, tmp_path / "plot.png")
    assert note == "no plot.png: plots need matplotlib, pip install 'sage-plugin[plot]'"
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"plot\.png: cannot be written"):
        figure.save(line, tmp_path / "file" / "plot.png")


def test_a_drawing_that_fails_leaves_the_old_plot(tmp_path):
    path = tmp_path / "plot.png"
    path.write_bytes(b"old")

    def broken(empty):
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        figure.save(broken, path)
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plot.png"]
