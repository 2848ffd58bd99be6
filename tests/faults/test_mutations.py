"""Ten thousand damaged files: each loader gives a record or one sentence, soon."""

from __future__ import annotations

import json
import random
import resource
import signal

import pytest

from sage_plugin.errors import SageError
from tests.faults.stores import LOADERS, sound

ROUNDS = 10_000
LIMIT_S = 5
"""For one file; a loader takes about a millisecond."""
MOST_KIB = 64 * 2**10

STRANGE = (
    None, True, False, 0, -1, 2**31, 2**62, 10**400, 1e308, -0.0, "", "x" * 5000, "\x1b[2J",
    "\ud800", "..", "/etc/passwd", "[" * 500, [], {}, [[]], [None] * 1000, {"a": {"b": {}}},
    "*" * 300, "NaN",
)  # fmt: skip


@pytest.fixture(scope="module")
def files_of(tmp_path_factory):
    return sound(tmp_path_factory.mktemp("sound"))


def places(value, path=()):
    """Every place in a parsed file."""
    yield path
    if isinstance(value, dict | list):
        for name, one in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(one, (*path, name))


def changed_value(draw, data):
    """A sound file with one value replaced, taken out, or given twice."""
    path = draw.choice(list(places(data)))
    if not path:
        return draw.choice(STRANGE)
    inside = data
    for name in path[:-1]:
        inside = inside[name]
    kind = draw.randrange(4)
    if kind == 0 and isinstance(inside, dict):
        inside[draw.choice(("", "new", "__class__"))] = draw.choice(STRANGE)
    elif kind == 1:
        del inside[path[-1]]
    elif kind == 2 and isinstance(inside, list):
        inside.extend(inside * 3)
    else:
        inside[path[-1]] = draw.choice(STRANGE)
    return data


def changed_bytes(draw, content):
    data = bytearray(content)
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(4)
        if kind == 0:
            data[at : at + 1] = bytes([draw.randrange(256)])
        elif kind == 1:
            del data[at : at + draw.randrange(40)]
        elif kind == 2:
            data[at:at] = data[draw.randrange(len(data) + 1) :][:200]
        else:
            data[at:at] = draw.choice(
                (b"\0", b"\xff\xfe", b'"', b"{", b"]", b"1e999", b"\n", b"NaN")
            )
    return bytes(data)


def damaged(draw, content):
    if draw.randrange(2):
        return changed_bytes(draw, content)
    lines = content.decode().strip().split("\n")
    try:
        return json.dumps(changed_value(draw, json.loads(content))).encode()
    except ValueError:  # a file of lines
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(changed_value(draw, json.loads(lines[at])))
        return "\n".join(lines).encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("name", LOADERS)
def test_whatever_a_file_holds_a_loader_ends_soon_and_says_so(tmp_path, files_of, name):
    file, load = LOADERS[name]
    path = tmp_path / file
    path.write_bytes(files_of[name])
    load(path)
    draw, refused = random.Random(name), 0

    def too_long(*_):
        raise AssertionError(f"over {LIMIT_S} s: {path.read_bytes()[:300]!r}")

    before = signal.signal(signal.SIGALRM, too_long)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        for _ in range(ROUNDS // len(LOADERS)):
            content = damaged(draw, files_of[name])
            path.write_bytes(content)
            signal.alarm(LIMIT_S)
            try:
                load(path)
            except SageError:
                refused += 1
            finally:
                signal.alarm(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MOST_KIB
    assert refused > 0 or name in ("ledger", "manifest"), "these leave out damaged lines"
