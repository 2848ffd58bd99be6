"""`import sage_plugin`: the public names, and how little it does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sage_plugin

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = [
    "Prologue", "QkNorm", "Rope", "__version__", "accelerate", "attention", "attention_varlen",
    "autotune", "continuous_batching", "grouped_linear", "launch", "linear", "normalized",
    "paged_attention", "patch", "patched", "prepare", "quantize_weight", "quantize_weights",
    "record", "refresh", "register", "report", "smoothing", "unpatch",
]  # fmt: skip
OPTIONAL = ("triton", "diffusers", "transformers", "accelerate", "typer", "rich", "safetensors")

# Runs in a fresh interpreter: which modules the statement loads, and which files it opens.
PROBE = """
import json, sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
exec(sys.argv[1])
print(json.dumps({"modules": sorted(sys.modules), "opened": opened}))
"""


def _probe(statement: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, statement],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _roots(modules: list[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


def test_the_public_names_are_these() -> None:
    assert sorted(sage_plugin.__all__) == PUBLIC
    assert sorted(dir(sage_plugin)) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_is_there(name: str) -> None:
    assert getattr(sage_plugin, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'patcj'"):
        _ = sage_plugin.patcj


def test_the_import_loads_no_optional_package() -> None:
    assert not _roots(_probe("import sage_plugin")["modules"]) & set(OPTIONAL)


def test_the_import_loads_none_of_our_parts() -> None:
    modules = _probe("import sage_plugin")["modules"]
    assert [name for name in modules if name.startswith("sage_plugin")] == ["sage_plugin"]


def test_the_import_reads_no_data_file() -> None:
    opened = [Path(name) for name in _probe("import sage_plugin")["opened"]]
    data = [path for path in opened if path.suffix in (".json", ".jsonl", ".safetensors", ".toml")]
    assert data == []


def test_the_runtime_needs_no_host_library() -> None:
    """`attention` and `patch` load torch, and neither diffusers nor transformers."""
    modules = _roots(_probe("from sage_plugin import attention, patch")["modules"])
    assert "torch" in modules
    assert not modules & {"diffusers", "transformers", "accelerate", "typer", "rich"}


def test_tuning_needs_no_host_library() -> None:
    modules = _roots(_probe("import sage_plugin.tune, sage_plugin.capture.store.reader")["modules"])
    assert not modules & {"diffusers", "transformers"}


@pytest.mark.parametrize("module", ["sage_plugin.cli", "sage_plugin.__main__"])
def test_the_command_line_loads_its_parts_lazily(module: str) -> None:
    """`sage --help` must answer at once: torch waits until a command needs it."""
    assert "torch" not in _roots(_probe(f"import {module}")["modules"])
