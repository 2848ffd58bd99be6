"""`sage doctor` from the outside, on devices that are not here."""

from __future__ import annotations

import re

import pytest

from sage_plugin import device
from sage_plugin.cli.console import stdout
from sage_plugin.registry import load
from sage_plugin.schema import KERNELS
from tests.cli.program import sage
from tests.script import loaded


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setattr(stdout, "width", 160)
    monkeypatch.setattr(load, "shipped_dir", lambda: None)
    monkeypatch.setattr(device, "triton_version", lambda: "3.6.0")


def told(monkeypatch, arch):
    """What the doctor says of an architecture: its lines, and the row of each kernel."""
    if arch:
        monkeypatch.setattr(device, "facts", lambda _=None: loaded("aot_builds").facts_of(arch))
    done = sage("doctor")
    assert done.exit_code == 0, done.output
    lines = [line.strip() for line in done.output.splitlines()]
    cells = [re.split(r" {2,}", line) for line in lines]
    return lines, {row[0]: row[1:] for row in cells if row[0] in KERNELS}


def test_a_hopper_runs_every_kernel_and_small_calls_are_the_host_s(monkeypatch):
    lines, rows = told(monkeypatch, "sm_90")
    assert rows["fav3_sage"] == ["hopper", "192x128, 12 warps", "192x128, 12 warps"]
    assert rows["sage"][0] == "portable, hopper"
    assert rows["fav2"][0] == "portable"
    assert "FP8 type of its matrix units: float8_e4m3fn" in lines
    (wide,) = [line for line in lines if line.startswith("128 channels: ")]
    assert wide.startswith("128 channels: fav3_sage:hopper; calls under 1.5e+11 operations, ")
    assert "3500 tokens of 24 heads" in wide
    assert "those under 1200 tokens and causal ones under 7168 tokens are the host" in wide
    (wider,) = [line for line in lines if line.startswith("256 channels: ")]
    assert wider.endswith("since heads of over 128 channels are faster on the host's attention")


@pytest.mark.parametrize(
    ("arch", "kernel", "words"),
    [
        ("sm_80", "fav3_sage", "sm_80 has no FP8 matrix units"),
        ("sm_75", "sage", "sm_75 has no INT8 tensor product"),
    ],
)
def test_what_cannot_run_says_why(monkeypatch, arch, kernel, words):
    lines, rows = told(monkeypatch, arch)
    assert rows[kernel] == ["-", "-", "-"]
    assert any(line.startswith(f"{kernel}: {words}") for line in lines)
    assert rows["sdpa"] == ["host", "-", "-"]


def test_a_cpu_emulates_and_auto_is_the_host(monkeypatch):
    lines, rows = told(monkeypatch, None)
    assert {row[0] for name, row in rows.items() if name.startswith("fav")} == {"emulation"}
    assert "64 channels: sdpa:host, since on a CPU the host's attention is the fastest" in lines


def test_the_environment_and_configs_are_told(monkeypatch, tmp_path):
    monkeypatch.setenv("SAGE_PLUGIN_KERNEL", "sage")
    folder = tmp_path / "user" / "sage_plugin" / "sm_90"
    folder.mkdir(parents=True)
    (folder / "attention.json").write_text("{")
    lines, _ = told(monkeypatch, "sm_90")
    assert any("SAGE_PLUGIN_KERNEL=sage" in line for line in lines)
    assert "64 channels: sage:portable" in lines
    assert any(line.startswith("user: not readable: ") for line in lines)
