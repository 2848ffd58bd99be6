"""The file layer: what is read may be anything, and what is written is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sage_plugin import files
from sage_plugin.errors import ConfigError, OutputError

LIMIT = 1000


def read(path):
    return files.read_json(Path(path), LIMIT, "file of ours")


def made(folder, kind):
    """A path of one kind, and what it must not lead to."""
    path = folder / "path"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "under a file":
        (folder / "file").write_text("{}")
        path = folder / "file" / "path"
    elif kind == "long":
        path = folder / ("x" * 300)
    elif kind == "nul":
        path = Path(f"{folder}/a\0b")
    return path


READ = {
    "absent": "no such file",
    "under a file": "no such file",
    "folder": "not a regular file",
    "pipe": "not a regular file",
    "device": "not a regular file",
    "loop": "cannot be read",
    "long": "cannot be read",
    "nul": "cannot be read",
}


@pytest.mark.parametrize(("kind", "words"), READ.items(), ids=READ)
def test_what_is_no_file_is_one_sentence_and_waits_for_nobody(tmp_path, kind, words):
    path = made(tmp_path, kind)
    with pytest.raises(ConfigError, match=words):
        read(path)
    with pytest.raises(ConfigError, match=words):
        list(files.read_lines(path, LIMIT))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "b": 2, "a": 3}', "the name 'a' stands twice"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": 1e999}', "too large for a number"),
        (f'{{"a": {2**63}}}', "a whole number of 19 digits is too large"),
        ('{"a": -' + "9" * 400 + "}", "too large"),
        ("[" * 900, "nested too deeply|not valid JSON"),
        ("x" * 1001, "larger than 1000 bytes, no file of ours is"),
    ],
)  # fmt: skip
def test_what_we_never_write_is_refused(tmp_path, text, words):
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read(tmp_path / "f.json")


def test_the_largest_numbers_come_back():
    assert files.loads(f"[{2**63 - 1}, {1 - 2**63}]", "it") == [2**63 - 1, 1 - 2**63]


def test_names_are_compared_in_linear_time():
    """Each of n names was once counted in turn; now a name is hashed as often as a dict needs."""
    hashed = 0

    class Name(str):
        def __hash__(self):
            nonlocal hashed
            hashed += 1
            return super().__hash__()

    pairs = [(Name(number), 0) for number in range(2000)]
    with pytest.raises(ValueError, match="the name '7' stands twice"):
        files._unique_names([*pairs, (Name(7), 1)])
    assert hashed < 3 * len(pairs)


def test_a_long_line_is_named_and_never_held(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\n" + b"x" * 5000 + b"\ntwo\n" + b"y" * 10 + b"\nlast")
    assert list(files.read_lines(path, 10)) == [
        b"one\n",
        None,
        b"two\n",
        b"y" * 10 + b"\n",
        b"last",
    ]


@pytest.mark.parametrize("kind", ["link", "dangling link", "loop", "pipe", "folder"])
def test_a_line_is_added_to_a_file_of_ours_alone(tmp_path, kind):
    victim = tmp_path / "victim"
    if kind == "link":
        victim.write_text("mine\n")
    path = made(tmp_path, kind) if "link" not in kind else tmp_path / "path"
    if "link" in kind:
        path.symlink_to(victim)
    with pytest.raises(OutputError, match="path: cannot be written"):
        files.append_line(path, "line")
    assert (victim.read_text() if victim.exists() else None) == (
        "mine\n" if kind == "link" else None
    )


@pytest.mark.parametrize("follow", [True, False])
def test_a_link_is_followed_for_a_user_and_replaced_in_a_folder_of_ours(tmp_path, follow):
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("old")
    link.symlink_to(victim)
    files.write_atomically(link, "new", follow=follow)
    assert link.read_text() == "new"
    assert link.is_symlink() == follow
    assert victim.read_text() == ("new" if follow else "old")


def test_a_device_is_written_to_and_stays_one(tmp_path):
    path = tmp_path / "null"
    path.symlink_to("/dev/null")
    files.write_json(path, {"a": 1})
    assert path.is_symlink()
    assert path.is_char_device()


def test_a_pipe_is_written_to_and_stays_one(tmp_path):
    path, got = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: got.append(path.read_text()))
    reader.start()
    files.write_atomically(path, "through the pipe")
    reader.join(timeout=20)
    assert got == ["through the pipe"]
    assert path.is_fifo()


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_standard_output_is_written_to_whatever_it_is(tmp_path, name):
    """A file behind it is not replaced, or what is printed afterwards would be lost."""
    if not os.path.exists(name):
        pytest.skip(f"no {name} here")
    script = (
        "from pathlib import Path; from sage_plugin import files; print('before');"
        f"files.write_atomically(Path({name!r}), 'content\\n'); print('after')"
    )
    with open(tmp_path / "out", "wb") as out:
        subprocess.run([sys.executable, "-c", script], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "before\ncontent\nafter\n"


def test_strays_of_killed_writers_go_and_those_at_work_stay(tmp_path):
    path = tmp_path / "results[1].json"
    old, young = (tmp_path / f".{path.name}.{pid}-00.tmp" for pid in (1, 2))
    other = tmp_path / ".results1.json.3-00.tmp"
    for stray in (old, young, other):
        stray.write_text("part")
    past = time.time() - 2 * files.STRAY_AGE_S
    for stray in (old, other):
        os.utime(stray, (past, past))
    files.write_json(path, [1])
    assert json.loads(path.read_text()) == [1]
    assert {p.name for p in tmp_path.iterdir()} == {path.name, young.name, other.name}


@pytest.mark.parametrize("kind", ["loop", "folder", "under a file", "long", "nul"])
def test_what_cannot_be_written_is_one_sentence(tmp_path, kind):
    with pytest.raises(OutputError, match="cannot be written"):
        files.write_json(made(tmp_path, kind), {})
