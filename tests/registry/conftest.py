"""Each test sees an empty memo, no environment override, and a user folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from sage_plugin import files
from sage_plugin.registry import lookup, store
from sage_plugin.schema import RegistryFile


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("SAGE_PLUGIN_CONFIG_DIR", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    lookup.clear()
    yield
    lookup.clear()


@pytest.fixture
def put(tmp_path: Path):
    """Write a registry file under `tmp_path/<root>` and return that root."""

    def write(file: RegistryFile, root: str = "configs") -> Path:
        folder = tmp_path / root
        path = folder / file.device.slug / f"{file.family}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomically(path, store.text_of(file))
        return folder

    return write
