"""Every snippet of docs/ runs, page by page, in an empty folder, and shows what the page shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("diffusers")

import sage_plugin
from sage_plugin.bench import forecast
from sage_plugin.capture.store.manifest import CallCounts
from sage_plugin.capture.store.writer import CaptureWriter
from sage_plugin.cli import app
from sage_plugin.kernels.attention import dispatch
from tests.capture.toys import line, tensors
from tests.docs import markdown
from tests.short import keep_short

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
EXECUTED = ("python", "bash", "console")
NEEDS = ("GPU", "weights")


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with the examples in it, without configs, network or GPU."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # With one thread the forecast of `sage bench` may say more than a minute, and refuse.
    monkeypatch.setattr(forecast, "PATIENCE_S", float("inf"))
    keep_short(monkeypatch)
    for name in ("CONFIG_DIR", "KERNEL", "VARIANT", "LAUNCH", "DISABLE"):
        monkeypatch.delenv(f"SAGE_PLUGIN_{name}", raising=False)
    folder = tmp_path / "page"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(folder)
    dispatch.forget()
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_snippets_of_a_page_run(page: Path, page_folder: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "snippet"}
    if page.stem != "quickstart":
        leave_what_pages_leave()
    ran = 0
    for block in markdown.blocks(page):
        assert block.language in EXECUTED, f"{page.name}:{block.line}: {block.language!r}"
        if block.not_run:
            continue
        ran += 1
        if block.language == "python":
            # Blank lines in front, so that a traceback names the line of the page.
            text = "\n" * (block.line - 1) + block.text
            exec(compile(text, str(page), "exec"), namespace)
        for command, shown in [] if block.language == "python" else block.commands():
            output = run(command, f"{page.name}:{block.line}")
            assert_shows(output, shown, f"{page.name}:{block.line}")
    assert ran, f"{page.name} runs nothing"


def leave_what_pages_leave() -> None:
    """Recordings and a policy of the page before: nobody makes a new folder for each page."""
    for name in ("captured_inputs", "in_python", "from_script"):
        writer = CaptureWriter(Path(name))
        writer.open()
        writer.save(tensors(), line())
        writer.close(CallCounts(complete=True))
    Path("policy.json").write_text('{"schema_version": 1, "rules": [{"kernel": "sage"}]}')


def run(command: str, where: str) -> str:
    """The output of a `sage` command that ends well."""
    words = shlex.split(command)
    assert words[0] == "sage", f"{where}: only sage commands are run, got {command!r}"
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, f"{where}: {command}\n{result.output}\n{result.exception!r}"
    return result.output


def assert_shows(output: str, shown: list[str], where: str) -> None:
    """The shown lines occur in this order; `...` stands for anything."""
    if not shown:
        return
    lines = (
        ".*" if line.strip() == "..." else ".*".join(map(re.escape, line.rstrip().split("...")))
        for line in shown
    )
    pattern = "\n".join(lines).replace(".*\n", "(?s:.*)\n")
    assert re.match(pattern, output), f"{where}: got\n{output}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_block_is_skipped_for_a_gpu_or_weights_alone(page: Path) -> None:
    for block in markdown.blocks(page):
        if block.not_run:
            assert any(word in block.not_run for word in NEEDS), f"{page.name}:{block.line}"


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "README.md", *ROOT.glob("examples/*/README.md")],
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    missing = [link for link in markdown.links(page) if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("command", ["sage bench --such-an-option", "sage tune", "ls"])
def test_a_command_that_fails_is_noticed(command: str, page_folder: Path) -> None:
    with pytest.raises(AssertionError, match="here"):
        run(command, "here")


def test_a_changed_output_is_noticed() -> None:
    assert_shows("a 1 b\nmore\nend\n", ["a ... b", "...", "end"], "here")
    with pytest.raises(AssertionError, match="here"):
        assert_shows("a 1 c\nend\n", ["a ... b", "end"], "here")
    with pytest.raises(AssertionError, match="here"):
        assert_shows("other\n", ["...", "end"], "here")


def test_the_functions_of_the_readme_run() -> None:
    (block,) = [b for b in markdown.blocks(ROOT / "README.md") if "sage_plugin.prepare(" in b.text]
    q, k, v = (torch.randn(2, 4, 64, 32) for _ in range(3))
    all_q, all_k, all_v = (x.transpose(1, 2).reshape(128, 4, 32) for x in (q, k, v))
    known = {
        "sage_plugin": sage_plugin, "q": q, "k": k, "v": v,
        "padding": torch.arange(64).expand(2, 1, 1, 64) < 50,
        "all_q": all_q, "all_k": all_k, "all_v": all_v,
        "starts": torch.tensor([0, 64, 128], dtype=torch.int32), "longest": 64,
    }  # fmt: skip
    exec(block.text, known)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert (known["out"] - exact).abs().sum() < 0.1 * exact.abs().sum()
    assert known["lse"].shape == (2, 4, 64)
