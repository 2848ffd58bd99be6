"""`sage` itself: what answers at once, and which exit code each kind of failure has."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from typing import IO

import click
import pytest
from typer.testing import CliRunner

import sage_plugin
from sage_plugin import errors
from sage_plugin.cli import app, output_folder
from tests.cli.program import program, sage

COMMANDS = ("demo", "capture", "tune", "bench", "configs", "policy")
CODES = {
    errors.SageError: 1,
    errors.TuningError: 1,
    errors.GateError: 1,
    errors.UsageError: 2,
    errors.UnknownKernelError: 2,
    errors.UnsupportedInputError: 2,
    errors.PatchError: 2,
    errors.CaptureError: 2,
    errors.ConfigError: 2,
    errors.DeviceError: 3,
    errors.OutputError: 3,
    errors.DemoError: 3,
}


HEAVY = {"torch", "triton", "diffusers", "transformers", "numpy"}
MOST_MODULES = 600
"""Typer and Rich are most of the 370 to 440 that a command loads; torch alone has 1,000."""
RECORDS = {"json_record", "key_numbers", "paged_records", "schema"}
LIGHT_PARTS = {"cli", "demo", "errors", "files", *RECORDS}


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"sage_plugin {sage_plugin.__version__}\n"
    assert result.stderr == ""


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_names_every_command(option):
    result = CliRunner().invoke(app, [option])
    assert result.exit_code == 0
    assert all(command in result.stdout for command in COMMANDS)
    assert result.stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_its_help(command):
    result = CliRunner().invoke(app, [command, "-h"])
    assert result.exit_code == 0
    assert "Usage: " in result.stdout


EVERY = [
    name
    for command in COMMANDS
    for name in {
        "configs": ("configs list", "configs explain", "configs check"),
        "policy": ("policy search", "policy prove", "policy sensitivity"),
    }.get(command, (command,))
]


@pytest.mark.parametrize("command", EVERY)
def test_help_begins_with_the_main_options_and_ends_with_examples_that_parse(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    said = sage(f"{command} --help").stdout
    if command in ("configs list", "configs check"):
        return
    first, _, rest = said.partition("Examples:")
    assert first.count("│ --") > 5
    main, *_ = re.split("╭─ (?:More options|Linears)", first)
    assert main.count("│ --") < 25
    lines = [line.split() for line in rest.splitlines() if line.strip()]
    assert lines
    for name, *words in lines:
        assert name == "sage"
        assert words[: len(command.split())] == command.split()
        parsed(words)


def parsed(words):
    """Read words as their command's own, without running it."""
    command, parent = program(), None
    while hasattr(command, "commands"):
        name, *words = words
        parent = click.Context(command, info_name=name, parent=parent)
        command = command.commands[name]
    return command.make_context(command.name, list(words), parent=parent)


def test_without_a_command_the_help_is_shown():
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2
    assert "Usage: " in result.output


def test_every_error_of_ours_has_an_exit_code_of_the_design():
    found = {
        x: x.exit_code
        for x in vars(errors).values()
        if isinstance(x, type) and issubclass(x, errors.SageError)
    }
    assert found == CODES


@pytest.mark.parametrize("error", CODES, ids=lambda error: error.__name__)
def test_an_error_is_one_sentence_and_its_exit_code(error, monkeypatch, tmp_path):
    def fail(folder, **_):
        raise error("got [this], allowed is that")

    monkeypatch.setattr(output_folder, "prepare", fail)
    result = CliRunner().invoke(app, ["demo", "--device", "cpu", "--out", str(tmp_path / "out")])
    assert result.exit_code == CODES[error]
    assert result.stderr == "error: got [this], allowed is that\n"
    assert result.stdout == ""


SCRIPT = """
import sys
from typing import IO
from sage_plugin.cli import main
sys.argv = ["sage", *{words!r}]
main()
"""


PRINTED = ("doctor", "--help", "tune --help", "--version")
"""Commands that print in ways of their own: a command's tables, typer's help, a callback."""


def answered(words: str, stdout: int | IO[str]) -> tuple[int, str]:
    """Exit code of a command, and what it says on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(words=words.split())],
        stdout=stdout, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("words", PRINTED)
def test_a_full_standard_output_is_one_sentence(words):
    with open("/dev/full", "w") as full:
        found = answered(words, full)
    says = "error: standard output: cannot be written (No space left on device)\n"
    assert found == (3, says)


@pytest.mark.parametrize("words", PRINTED)
def test_a_closed_pipe_is_no_failed_gate_and_says_nothing(words):
    read_end, write_end = os.pipe()
    os.close(read_end)
    found = answered(words, write_end)
    os.close(write_end)
    assert found == (141, "")


CLOSED = """
import os, subprocess, sys
os.close(1)
os._exit(subprocess.run([sys.executable, "-c", {script!r}], close_fds=False).returncode)
"""
OPENED = """
import os
from sage_plugin.cli.console import keep_numbers
keep_numbers()
raise SystemExit(os.open(os.devnull, os.O_RDONLY))
"""


def without_stdout(script: str) -> tuple[int, str]:
    """Exit code of a program that has no standard output, and what it says on stderr."""
    program = [sys.executable, "-c", CLOSED.format(script=script)]
    done = subprocess.run(program, stderr=subprocess.PIPE, text=True, check=False)
    return done.returncode, done.stderr


def test_a_closed_standard_output_is_one_sentence_and_lends_no_file_its_number():
    says = "error: standard output: cannot be written (it is closed)\n"
    assert without_stdout(SCRIPT.format(words=["doctor"])) == (3, says)
    number, said = without_stdout(OPENED)
    assert number > 2, said


def test_letters_that_a_terminal_has_not_are_spelt_out():
    script = "from sage_plugin.cli.console import guarded, say\nwith guarded(): say('1 ± 2 × 3 ü')"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.stdout == "1 +- 2 x 3 ?\n"


def test_an_error_that_is_not_ours_is_not_dressed_up(monkeypatch):
    def fail(folder, **_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(output_folder, "prepare", fail)
    result = CliRunner().invoke(app, ["demo", "--device", "cpu"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_verbose_logs_to_stderr(monkeypatch):
    def noted(folder, **_):
        logging.getLogger("sage_plugin.test").info("something happened")
        raise errors.UsageError("stop")

    monkeypatch.setattr(output_folder, "prepare", noted)
    for words, expected in ((["--verbose"], True), ([], False)):
        logging.getLogger().handlers.clear()
        result = CliRunner().invoke(app, [*words, "demo", "--device", "cpu"])
        assert ("something happened" in result.stderr) is expected
        assert result.stdout == ""


PROBE = """
import json, sys
from sage_plugin.cli import main
try:
    main()
except SystemExit as end:
    print(json.dumps({"code": end.code, "modules": sorted(sys.modules)}))
"""


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["tune", "--help"], ["policy", "prove", "-h"], ["nope"]]
)
def test_what_needs_no_kernel_loads_little(words):
    """`sage --help` answers at once; torch alone takes a second to load."""
    done = python("-c", PROBE, *words)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["code"] == (2 if words == ["nope"] else 0)
    modules = told["modules"]
    assert not HEAVY & {name.split(".")[0] for name in modules}
    assert len(modules) < MOST_MODULES
    parts = {name.split(".")[1] for name in modules if name.startswith("sage_plugin.")}
    assert parts <= LIGHT_PARTS


def test_it_runs_as_a_module_under_a_name_that_nothing_else_uses():
    done = python("-m", "sage_plugin", "--version")
    assert (done.returncode, done.stdout) == (0, f"sage_plugin {sage_plugin.__version__}\n")
    done = python("-m", "sage_plugin", "nope")
    assert done.returncode == 2
    assert "No such command" in done.stderr
    done = python("-m", "sage_plugin", "demo", "--size", "huge", "--device", "cpu")
    assert done.returncode == 2
    assert done.stderr == "error: --size 'huge': allowed are small, large\n"
