"""Columns of CSV and JSON, and files that are whole or absent."""

from __future__ import annotations

import csv
import io
import json
import os

import pytest

from sage_plugin import device as devices
from sage_plugin import files
from sage_plugin.bench import report
from sage_plugin.bench.rows import KernelRow, Table
from sage_plugin.errors import OutputError
from sage_plugin.measure.clocks import ClockSnapshot
from sage_plugin.measure.inputs import self_attention
from sage_plugin.schema import ErrorMetrics, LaunchConfig, Timing

ERRORS = ErrorMetrics(0.01, 0.999, 0.1, 0.2, 0.99, 0.02, 0.998, 1.0, 0.03, 0.01, 0)
CONFIG = LaunchConfig(128, 64, 8, 3, "pointer", True, True, 1)
SHAPE = self_attention(1, 2, 1000, 64)


def row_of(**changes):
    values = {
        "input": "one, two",
        "source": "capture",
        "input_sha256": "abc",
        "shape": SHAPE,
        "kernel": "sage",
        "variant": "portable",
        "config": CONFIG,
        "config_source": "exact",
        "time": Timing(2.0, 1.9, 2.2, 30, "events"),
        "kernel_time": Timing(1.5, 1.4, 1.6, 30, "events"),
        "flops": 512_000_000,
        "moved_bytes": 1_000_000,
        "errors": ERRORS,
        "reference": "fav2:portable",
        "reference_errors": ERRORS,
        "speedup": 1.5,
        "speedup_low": 1.4,
        "speedup_high": 1.6,
        "gate": ("too wrong", "too late"),
        "stamp": "clean",
        "note": "",
    }
    return KernelRow(**{**values, **changes})


def table_of(*rows):
    state = ClockSnapshot(1980, 2619, 40, 650.0, 700.0, ("power cap",))
    return Table("one, two", SHAPE, rows, "clean", 1.001, state, None, ("fav3_fp8 failed",))


def test_csv_has_the_whole_identity_and_all_numbers():
    facts, toolchain = devices.facts("cpu"), devices.toolchain()
    plain = row_of(config=None, kernel_time=None, reference_errors=None, speedup=None, gate=())
    text = report.csv_text([table_of(row_of(), plain)], facts, toolchain)
    first, second = csv.DictReader(io.StringIO(text))
    assert first["input"] == "one, two"
    assert json.loads(first["config"])["block_m"] == 128
    assert (first["method"], first["samples"], first["config_source"]) == ("events", "30", "exact")
    assert (first["time_ms"], first["time_low_ms"], first["time_high_ms"]) == ("2.0", "1.9", "2.2")
    assert first["kernel_time_ms"] == "1.5"
    assert float(first["throughput_tflops"]) == pytest.approx(0.256)
    assert float(first["bandwidth_gb_per_s"]) == pytest.approx(0.5)
    assert float(first["arithmetic_intensity_flop_per_byte"]) == pytest.approx(512)
    assert (first["gate"], first["gate_reasons"]) == ("fail", "too wrong; too late")
    assert (first["oracle_cosine"], first["reference_cosine"]) == ("0.999", "0.999")
    assert (first["device_slug"], first["version_torch"]) == (facts.slug, toolchain.torch)
    assert (second["config"], second["kernel_time_ms"], second["speedup"]) == ("", "", "")
    assert second["gate"] == "pass"


def test_json_is_strict_and_holds_the_records():
    facts, toolchain = devices.facts("cpu"), devices.toolchain()
    body = json.loads(report.json_text([table_of(row_of())], facts, toolchain))
    table = body["tables"][0]
    assert body["device"]["slug"] == facts.slug
    assert table["clocks_before"]["power_limit_w"] == 700.0
    assert table["clocks_after"] is None
    assert table["failed"] == ["fav3_fp8 failed"]
    assert table["rows"][0]["config"]["block_n"] == 64
    assert table["rows"][0]["tflops"] == pytest.approx(0.256)
    del table["rows"][0]["tflops"], table["rows"][0]["gb_per_s"], table["rows"][0]["flop_per_byte"]
    assert KernelRow.from_json(table["rows"][0]) == row_of()


def test_no_row_is_no_csv_line():
    assert report.csv_text([], devices.facts("cpu"), devices.toolchain()) == ""


def test_write_replaces_a_file_as_a_whole(tmp_path):
    path = tmp_path / "out.csv"
    path.write_text("old")
    files.write_atomically(path, "new\n")
    assert path.read_text() == "new\n"
    assert os.listdir(tmp_path) == ["out.csv"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "out.csv"
    path.write_text("old")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OutputError, match=r"out\.csv: cannot be written \(No space left"):
        files.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.csv"]


def test_unwritable_places_are_refused_before_the_run(tmp_path):
    with pytest.raises(OutputError, match="is a folder; name a file"):
        report.check_writable(tmp_path)
    with pytest.raises(OutputError, match="does not exist; create it first"):
        report.check_writable(tmp_path / "no" / "out.csv")
    report.check_writable(tmp_path / "out.csv")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_json_does_not_have_are_null(value):
    row = row_of(speedup=value)
    body = json.loads(report.json_text([table_of(row)], devices.facts("cpu"), devices.toolchain()))
    assert body["tables"][0]["rows"][0]["speedup"] is None
    assert body["tables"][0]["rows"][0]["flops"] == row.flops
