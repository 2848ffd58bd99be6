"""What the wheel and the source archive hold, and that the wheel works far from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = "from sage_plugin.registry.load import shipped_dir; print(shipped_dir())"
CACHES = ("__pycache__", ".pyc", ".venv", ".git/", ".ruff_cache", ".mypy_cache", ".hypothesis")


def _build(target: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.iterdir()
    return archive


def _files(folder: str, *suffixes: str) -> set[str]:
    """Paths below the checkout, relative to it, caches left out."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def wheel_names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files in a folder of their own, as an installation lays them down."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def _run(site: Path, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SAGE_PLUGIN_")}
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env={**kept, **home, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_wheel_holds_every_module(wheel_names: set[str]) -> None:
    assert _files("sage_plugin", ".py") <= wheel_names


def test_the_wheel_holds_the_shipped_configs(wheel_names: set[str]) -> None:
    configs = _files("configs", ".json")
    assert configs, "configs/ holds no JSON file"
    assert {f"sage_plugin/{name}" for name in configs} <= wheel_names


def test_the_wheel_holds_the_demo_model(wheel_names: set[str]) -> None:
    data = _files("sage_plugin/demo", ".safetensors", ".json", ".md")
    assert any(name.endswith(".safetensors") for name in data), "the demo's weights are missing"
    assert data <= wheel_names


def test_the_wheel_holds_nothing_else(wheel_names: set[str]) -> None:
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"sage_plugin"}
    assert not [name for name in wheel_names if any(cache in name for cache in CACHES)]


def test_the_wheel_names_both_commands_and_the_license(unpacked: Path) -> None:
    (info,) = unpacked.glob("*.dist-info")
    scripts = (info / "entry_points.txt").read_text()
    assert "sage = sage_plugin.cli:main" in scripts
    assert "sage-plugin = sage_plugin.cli:main" in scripts
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()


def test_the_wheel_imports_far_from_the_checkout(unpacked: Path, tmp_path: Path) -> None:
    done = _run(unpacked, tmp_path, "-c", "import sage_plugin; print(sage_plugin.__file__)")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(unpacked)


def test_the_wheel_reads_the_configs_inside_it(unpacked: Path, tmp_path: Path) -> None:
    done = _run(unpacked, tmp_path, "-c", SHIPPED)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == unpacked / "sage_plugin" / "configs"


def test_a_checkout_reads_the_configs_beside_the_package(tmp_path: Path) -> None:
    done = _run(ROOT, tmp_path, "-c", SHIPPED)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "configs"


def test_the_wheel_lists_its_configs(unpacked: Path, tmp_path: Path) -> None:
    done = _run(unpacked, tmp_path, "-m", "sage_plugin", "configs", "list", "--all")
    assert done.returncode == 0, done.stderr
    configs = unpacked / "sage_plugin/configs"
    slugs = {path.parent.name for path in configs.glob("*/attention.json")}
    assert list(configs.glob("spaces/*.json")), "search spaces come along and are no configs"
    assert [slug for slug in sorted(slugs) if slug not in done.stdout] == []


def test_the_source_archive_can_rebuild_and_test_itself(tmp_path: Path) -> None:
    with tarfile.open(_build("sdist", tmp_path)) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for needed in ("pyproject.toml", "Makefile", "README.md", "LICENSE", "CHANGELOG.md"):
        assert needed in names
    for folder in ("sage_plugin", "tests", "configs", "docs", "examples", "scripts"):
        assert _files(folder, ".py", ".json", ".md") <= names
    assert not [name for name in names if any(cache in name for cache in CACHES)]
