"""What the figure of a proof shows."""

from __future__ import annotations

import math
import sys

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from sage_plugin.bench.clips import plot
from tests.bench.clips.comparisons import timed, untimed


def axes_of(proof):
    figure = Figure()
    plot.draw(proof, figure)
    return figure.axes


def test_the_plane_and_the_curves():
    plane, curves = axes_of(timed())
    xs, ys = plane.lines[0].get_data()
    assert (list(xs), list(ys)) == ([4.0, 6.0], [30.0, 40.0])
    points = {tuple(spot.get_offsets()[0]) for spot in plane.collections}
    assert points == {(4.0, 30.0), (6.0, 40.0), (5.0, 36.0)}
    assert {text.get_text() for text in plane.texts} == {"fav3_fp8", "sage", "policy", "sdpa"}
    assert curves.get_yscale() == "log"
    drawn = {line.get_label(): list(line.get_ydata()) for line in curves.lines}
    assert list(drawn) == ["fav3_fp8", "sage", "policy"]
    assert drawn["policy"] == pytest.approx([0.002, 0.004, 0.008, 0.016])


def test_the_hosts_clip_has_no_place_in_the_plane():
    plane, _ = axes_of(timed(math.inf))
    assert {tuple(spot.get_offsets()[0]) for spot in plane.collections} == {
        (4.0, 30.0),
        (6.0, 40.0),
    }


def test_without_times_there_are_the_curves_alone():
    (curves,) = axes_of(untimed())
    assert [line.get_label() for line in curves.lines] == ["sage", "policy"]


def test_saved_or_why_not(tmp_path, monkeypatch):
    assert plot.save(timed(), tmp_path / "plane.png") == ""
    assert (tmp_path / "plane.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'sage-plugin[plot]'" in plot.save(timed(), tmp_path / "other.png")
    assert not (tmp_path / "other.png").exists()
