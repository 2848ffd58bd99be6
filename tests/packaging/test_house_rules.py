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
        ("tune/race.py", "import torch\nx = torch.load('x', weights_only=False)\n", "pickled"),
        ("tune/race.py", "try:\n    x = 1\nexcept Exception:\n    pass\n", "swallowed"),
        ("tune/utils.py", "", "drawer"),
        ("tune/race.py", "x = 1\n" * 501, "lines"),
        ("kernels/attention/launch.py", "run(num_warps=4)\n", "tuning number"),
        ("kernels/attention/launch.py", "run({'block_m': 128})\n", "tuning number"),
        ("kernels/attention/launch.py", "run(BLOCK_M=128)\n", "tuning number"),
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
        ("kernels/attention/search_space/sage.py", "run(num_warps=4)\n"),
        (
            "kernels/quantize/triton/block_kernels.py",
            "run(num_warps=4)  # not tuned: one row a warp\n",
        ),
        ("kernels/attention/flash_kernel.py", "x = 1\n" * 600),
        ("kernels/attention/flash_kernel.py", "tl.range(0, n, num_stages=1)\n"),
        ("kernels/attention/launch.py", "run(num_warps=config.num_warps)\n"),
    ],
)
def test_what_is_allowed_passes(rules: ModuleType, tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "sage_plugin" / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert rules.breaches(tmp_path) == []


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / "sage_plugin" / (name.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_class_name_used_twice_is_named_with_both_files(
    rules: ModuleType, tmp_path: Path
) -> None:
    write(tmp_path, a__plan="class Plan: ...\n", b__plan="x = 1\nclass Plan: ...\n")
    (breach,) = rules.breaches(tmp_path)
    assert breach.startswith("sage_plugin/b/plan.py:2: sage_plugin/a/plan.py has a class Plan too")


def test_private_and_nested_classes_count_too(rules: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, a="class _Plan: ...\n", b="def f():\n    class _Plan: ...\n")
    (breach,) = rules.breaches(tmp_path)
    assert "_Plan" in breach


@pytest.mark.parametrize(
    ("folder", "size", "words"),
    [
        ("race", 15, None),
        ("race", 16, "16 Python files, at most 15"),
    ],
)
def test_files_of_a_folder(
    rules: ModuleType, tmp_path: Path, folder: str, size: int, words: str | None
) -> None:
    write(tmp_path, **{f"{folder}__file_{i}": "" for i in range(size)})
    (tmp_path / "sage_plugin" / folder / "__init__.py").touch()
    expected = [f"sage_plugin/{folder}: {words}"] if words else []
    assert [found.removesuffix(": split by noun") for found in rules.breaches(tmp_path)] == expected


@pytest.mark.parametrize("decorator", ["triton.jit", "gluon.jit", "jit", "tl.jit(noinline=True)"])
@pytest.mark.parametrize(
    ("count", "words"), [(20, None), (21, "f takes 21 parameters, at most 20")]
)
def test_parameters_of_a_jit_function(
    rules: ModuleType, tmp_path: Path, decorator: str, count: int, words: str | None
) -> None:
    names = ", ".join(["a", *(f"B{i}: tl.constexpr" for i in range(count - 2)), "*rest"])
    write(tmp_path, kernels__row_kernel=f"@{decorator}\ndef f({names}): ...\n")
    found = rules.breaches(tmp_path)
    assert len(found) == (words is not None)
    assert all(words and words in one for one in found)


def test_a_function_that_is_not_jit_takes_what_it_likes(rules: ModuleType, tmp_path: Path) -> None:
    names = ", ".join(f"a{i}" for i in range(30))
    write(tmp_path, race=f"@cache\ndef f({names}): ...\n")
    assert rules.breaches(tmp_path) == []


@pytest.mark.parametrize(
    ("before", "inside", "lost"),
    [
        ("old = new", "old = new; new = f(old, i)", True),
        ("old = new", "g(i)\n        if i > 1:\n            old = new", True),
        ("old = new + 0", "old = new; new = f(old, i)", False),
        ("old = new", "new = f(old, i); old = new", False),
        ("old = new; new = 1", "old = new; new = f(old, i)", False),
        ("old = new; old, _ = f(new, 1)", "old = new", False),
    ],
)
@pytest.mark.parametrize("loop", ["for i in range(n)", "while i < n"])
def test_a_name_that_a_loop_does_not_carry(
    rules: ModuleType, tmp_path: Path, before: str, inside: str, loop: str, lost: bool
) -> None:
    """`sage` at 128 channels with `overlap` and a causal mask hung a GPU by it."""
    code = f"@gluon.jit\ndef f(new, n):\n    {before}\n    {loop}:\n        {inside}\n"
    write(tmp_path, kernels__row_kernel=code)
    found = rules.breaches(tmp_path)
    assert len(found) == lost
    assert all("the loop does not carry old" in one for one in found)


def test_a_large_file_is_named(rules: ModuleType, tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"x")
    with large.open("wb") as file:
        file.truncate(14 * 2**20)
    (breach,) = rules.oversized([small, large])
    assert str(large) in breach
