"""The package keeps the house rules, and the checker notices each kind of breach."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.script import loaded

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rules() -> ModuleType:
    return loaded("house_rules")


def test_the_package_keeps_them(rules: ModuleType) -> None:
    assert rules.breaches() == []


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("device.py", "import os\nhome = os.environ['HOME']\n", "environment"),
        ("device.py", "import os\nhome = os.getenv('HOME')\n", "environment"),
        ("device.py", "from os import environ\n", "environment"),
        ("tune/race.py", "print('done')\n", "prints"),
        ("tune/race.py", "import pickle\n", "pickled"),
        ("tune/race.py", "import torch\nx = torch.load('x')\n", "pickled"),
        ("tune/race.py", "try:\n    x = 1\nexcept Exception:\n    pass\n", "swallowed"),
        ("tune/utils.py", "", "drawer"),
        ("tune/race.py", "x = 1\n" * 501, "lines"),
        ("kernels/attention/sage/launch.py", "run(num_warps=4)\n", "tuning number"),
        ("kernels/attention/sage/launch.py", "run({'block_m': 128})\n", "tuning number"),
        ("kernels/attention/sage/launch.py", "run(BLOCK_M=128)\n", "tuning number"),
    ],
)
def test_a_breach_is_named(
    rules: ModuleType, tmp_path: Path, name: str, text: str, word: str
) -> None:
    path = tmp_path / "sage_plugin" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    (breach,) = rules.breaches(tmp_path)
    assert breach.startswith(f"sage_plugin/{name}:")
    assert word in breach


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("settings.py", "import os\nhome = os.environ['HOME']\n"),
        ("cli/console.py", "print('done')\n"),
        ("kernels/attention/sage/space.py", "run(num_warps=4)\n"),
        ("kernels/quant/triton_k.py", "run(num_warps=4)  # not tuned: one row a warp\n"),
        ("kernels/attention/sage/portable.py", "x = 1\n" * 600),
        ("kernels/attention/sage/portable.py", "tl.range(0, n, num_stages=1)\n"),
        ("kernels/attention/sage/launch.py", "run(num_warps=config.num_warps)\n"),
    ],
)
def test_what_is_allowed_passes(rules: ModuleType, tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "sage_plugin" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert rules.breaches(tmp_path) == []


def test_a_large_file_is_named(rules: ModuleType, tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"x")
    with large.open("wb") as file:
        file.truncate(14 * 2**20)
    (breach,) = rules.oversized([small, large])
    assert str(large) in breach
