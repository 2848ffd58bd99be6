"""`sage bench` end to end on tiny inputs: tables, files, exit codes."""

from __future__ import annotations

import csv
import dataclasses
import io
import json

import pytest

from sage_plugin.bench import compare
from sage_plugin.cli import console
from sage_plugin.cli.bench.command import METRICS
from sage_plugin.families.attention import replay
from sage_plugin.measure.timing import TimingLimits
from sage_plugin.schema import KERNELS
from tests.bench.folders import SHAPE, write
from tests.bench.test_compare import breaks
from tests.cli.program import error_of, sage

TINY = ["-b", "1", "-hq", "2", "-sq", "48", "-d", "32", "--device", "cpu"]
QUICK = TimingLimits(warmup=0, warmup_s=0.0, min_samples=2, max_samples=2, budget_s=1.0)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(compare, "CPU_LIMITS", QUICK)
    monkeypatch.setenv("COLUMNS", "100")


def bench(*args):
    return sage("bench", *args)


def rows_of(text):
    return list(csv.DictReader(io.StringIO(text)))


def test_a_capture_folder_is_the_default_input(tmp_path, monkeypatch):
    write(tmp_path / "captured_inputs", count=2)
    monkeypatch.chdir(tmp_path)
    result = bench("--device", "cpu", "--kernel", "sage", "--compare-to-ref", "fav2")
    assert result.exit_code == 0
    assert "000000 transformer.blocks.0.attn step 0" in result.stdout
    assert "emulation: not a speed" in result.stdout
    assert "against fav2:emulation" in " ".join(result.stdout.split())
    assert "All 2 inputs" in result.stdout
    assert "Next: sage tune captured_inputs, since all configs are defaults" in result.stderr


def test_csv_on_stdout_is_nothing_but_csv():
    result = bench(*TINY, "--csv", "-", "--print-compare-stats")
    lines = rows_of(result.stdout)
    assert result.exit_code == 0
    assert [line["kernel"] for line in lines] == [k for k in KERNELS if k != "torch"]
    assert all(len(line) == len(lines[0]) and None not in line for line in lines)
    assert {line["note"] for line in lines if line["kernel"] != "sdpa"} == {
        "emulation: not a speed"
    }
    assert "gate" in result.stderr
    assert "Next: " in result.stderr


def test_json_on_stdout_is_nothing_but_json():
    body = json.loads(bench(*TINY, "--json", "-", "--kernel", "fav3_sage").stdout)
    assert body["tables"][0]["rows"][0]["variant"] == "emulation"


def test_files_and_a_last_line_that_names_them(tmp_path):
    table, record = tmp_path / "out.csv", tmp_path / "out.json"
    result = bench(*TINY, "--kernel", "sage", "--csv", table, "--json", record)
    assert result.exit_code == 0
    assert len(rows_of(table.read_text())) == 1
    assert len(json.loads(record.read_text())["tables"]) == 1
    assert str(table) in result.stderr.replace("\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.json"]


def test_max_inputs_layout_dtype_causal_groups_seed(tmp_path):
    folder = write(tmp_path / "captures", count=3)
    result = bench(folder, "--max-inputs", 1, "--kernel", "sdpa", "--csv", "-", "--device", "cpu")
    assert len(rows_of(result.stdout)) == 1
    shape = ["-hk", "1", "-sk", "64", "--causal", "--layout", "bshd", "--dtype", "fp16"]
    result = bench(
        *TINY, *shape, "--inputs-distribution", "drift", "--kernel", "qk_int8", "--csv", "-"
    )
    line = rows_of(result.stdout)[0]
    fields = ("kernel", "shape_layout", "shape_dtype", "shape_heads_k", "shape_causal")
    assert [line[name] for name in fields] == ["sage", "bshd", "float16", "1", "True"]
    assert line["source"] == "synthetic:drift"


@pytest.mark.parametrize("kind", ["key_bias", "dense"])
@pytest.mark.parametrize("where", ["drawn", "captured"])
def test_masked_inputs_run_on_every_kernel(tmp_path, kind, where):
    if where == "drawn":
        words = [*TINY, "--causal", "--mask", kind]
    else:
        shape = dataclasses.replace(SHAPE, mask_kind=kind)
        words = [write(tmp_path / "captures", shape), "--device", "cpu"]
    result = bench(*words, "--gate", "--compare-to-ref", "fav2", "--csv", "-")
    assert result.exit_code == 0, result.stderr
    lines = rows_of(result.stdout)
    assert [line["kernel"] for line in lines][:2] == ["fav2", "sdpa"]
    assert {line["shape_mask_kind"] for line in lines} == {kind}
    assert {line["gate"] for line in lines} == {"pass"}
    every_pair = 2 * 2 * 64 * 48 * 48
    assert 0.1 * every_pair < int(lines[0]["flops"]) < 0.9 * every_pair
    title = " ".join(result.stderr.split())
    assert f"bhsd causal {kind}" in title or f"bhsd {kind}" in title


def test_layer_names_of_a_foreign_manifest_are_harmless(tmp_path):
    folder = write(tmp_path / "captures", count=2)
    manifest = folder / "manifest.jsonl"
    line = manifest.read_text().replace("transformer.blocks", "\\u001b[2Jevil\\u0007")
    manifest.write_text(line)
    (folder / "\x1b[5m.safetensors.tmp").write_text("")
    shown = bench(folder, "--kernel", "sdpa", "--device", "cpu")
    as_csv = bench(folder, "--kernel", "sdpa", "--device", "cpu", "--csv", "-")
    assert r"\x1b[2Jevil\x07" in shown.stdout
    for text in (shown.stdout, shown.stderr, as_csv.stdout, as_csv.stderr):
        assert not {"\x1b", "\x07"} & set(text)


@pytest.mark.parametrize("metric", METRICS)
def test_metric_chooses_the_columns(metric):
    heads = dict(zip(METRICS, ("time ms", "TFLOPS", "GB/s", "FLOP/B"), strict=True))
    shown = bench(*TINY, "--kernel", "fav2", "--metric", metric).stdout
    assert [head in shown for head in heads.values()] == [name == metric for name in heads]


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("reference", [(), ("--compare-to-ref", "fav2")])
def test_the_widest_table_fits_the_terminal(monkeypatch, columns, reference):
    # Not by COLUMNS: a console that was made while that was set keeps its width.
    monkeypatch.setattr(console.stdout, "_width", columns)
    shown = bench(*TINY, *reference).stdout
    assert max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown
    kernel_lines = [line for line in shown.splitlines() if line.startswith("fav3_fp8")]
    assert len(kernel_lines) == (2 if columns == 80 and reference else 1)


def test_gate_passes_with_exit_0():
    assert bench(*TINY, "--gate", "--inputs-distribution", "biased").exit_code == 0


def test_gate_fails_a_wrong_kernel_with_exit_1_after_writing(monkeypatch):
    real = replay.AttentionReplay.checked

    def wrong(call, decision, *args):
        found = real(call, decision, *args)
        return dataclasses.replace(found, out=-found.out) if decision.kernel == "sage" else found

    monkeypatch.setattr(replay.AttentionReplay, "checked", wrong)
    failed = bench(*TINY, "--gate", "--csv", "-")
    assert failed.exit_code == 1
    assert error_of(failed).startswith("accuracy gate: sage:emulation on 1x2 heads of 32, 48")
    assert "cosine of the worst head is -0.99" in error_of(failed)
    assert "(and 3 more)" in error_of(failed)
    verdicts = {line["kernel"]: line["gate"] for line in rows_of(failed.stdout)}
    assert verdicts["sage"] == "fail"
    assert verdicts["fav2"] == "pass"
    assert bench(*TINY).exit_code == 0


def test_a_named_kernel_that_cannot_run_is_exit_4(monkeypatch):
    breaks(monkeypatch, "fav3_fp8", "no kernel image")
    assert bench(*TINY).exit_code == 0
    named = bench(*TINY, "--kernel", "fav3_fp8", "--kernel", "sage")
    assert named.exit_code == 4
    assert "fav3_fp8 failed: RuntimeError: no kernel image" in named.stdout
    assert bench(*TINY, "--gate").exit_code == 1


def test_one_damaged_capture_of_two_is_exit_4(tmp_path):
    folder = write(tmp_path / "captures", count=2)
    file = folder / "000001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    result = bench(folder, "--kernel", "sdpa", "--device", "cpu")
    assert result.exit_code == 4
    assert "checksum" in result.stderr
    assert "000000" in result.stdout


def test_a_cpu_compares_on_the_same_captures_each_time_and_names_them(tmp_path, monkeypatch):
    from sage_plugin.bench import forecast
    from sage_plugin.bench.suite import captured

    folder = write(tmp_path / "captures", count=4)
    one = forecast.cpu_seconds(captured(folder).cases[:1], [("sdpa", "auto")])
    monkeypatch.setattr(forecast, "PATIENCE_S", 2.5 * one)
    for _ in range(2):
        result = bench(folder, "--kernel", "sdpa", "--csv", "-")
        assert "comparing on 2 of them, 000000, 000002 (--force for all)" in result.stderr
        names = [row["input"].split()[0] for row in rows_of(result.stdout)]
        assert names == ["000000", "000002"]


def test_markdown_goes_where_csv_goes(tmp_path):
    result = bench(*TINY, "--kernel", "sage", "--markdown", "out.md", "--csv", "-")
    assert "Wrote out.md." in result.stderr
    written = (tmp_path / "out.md").read_text()
    assert "| sage |" in written
    printed = bench(*TINY, "--kernel", "sage", "--markdown", "-").stdout
    assert [line for line in printed.splitlines() if line.startswith("|")] == [
        line for line in written.splitlines() if line.startswith("|")
    ]


def test_force_runs_what_would_be_refused(monkeypatch):
    from sage_plugin.bench import forecast

    monkeypatch.setattr(forecast, "PATIENCE_S", -1.0)
    assert bench(*TINY, "--kernel", "sdpa").exit_code == 2
    assert bench(*TINY, "--kernel", "sdpa", "--force").exit_code == 0


@pytest.mark.gpu
def test_a_preset_on_a_gpu_with_its_gate():
    result = bench(
        "--preset", "wan-480p", "--gate", "--compare-to-ref", "fav2",
        "--inputs-distribution", "biased", "--csv", "-",
    )  # fmt: skip
    assert result.exit_code == 0
    assert {line["method"] for line in rows_of(result.stdout)} == {"events"}
