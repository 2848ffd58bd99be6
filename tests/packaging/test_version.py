"""The version stands in one place, and everything else reads it there."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import sage_plugin

ROOT = Path(__file__).resolve().parents[2]


def test_the_project_file_reads_the_version_from_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in settings["project"]
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["hatch"]["version"]["path"] == "sage_plugin/__init__.py"


def test_no_other_module_repeats_the_version() -> None:
    literal = re.compile(rf"""["']{re.escape(sage_plugin.__version__)}["']""")
    holders = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "sage_plugin").rglob("*.py")
        if literal.search(path.read_text())
    ]
    assert holders == ["sage_plugin/__init__.py"]


def test_an_installation_reports_the_same_version() -> None:
    try:
        installed = importlib.metadata.version("sage-plugin")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("sage-plugin runs from the checkout, not installed")
    assert installed == sage_plugin.__version__


def test_the_changelog_knows_the_version() -> None:
    assert f"[{sage_plugin.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
