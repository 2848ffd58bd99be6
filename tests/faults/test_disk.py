"""A disk that is full, broken or read-only: nothing acknowledged is lost, nothing half written."""

from __future__ import annotations

import errno

import pytest

from sage_plugin.errors import SageError
from tests.faults.disk import Disk
from tests.faults.stores import STORES

CODES = (errno.ENOSPC, errno.EIO, errno.EROFS)


def held(store, path):
    """What a reader finds: nothing, where it is told so in a sentence of ours."""
    try:
        return store.read(path)
    except SageError:
        return set()


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize("name", STORES)
def test_each_call_that_writes_may_fail(tmp_path, name, lasting):
    store = STORES[name]
    with Disk() as counted:
        written = set(store.write(tmp_path / "sound"))
    assert store.read(tmp_path / "sound") == written
    assert len(written) > 1
    assert counted.calls > 5
    for number in range(counted.calls):
        path = tmp_path / f"{number}"
        with Disk(number, lasting=lasting, code=CODES[number % len(CODES)]):
            acknowledged = set(store.write(path))
        assert held(store, path) >= acknowledged, f"call {number} of {counted.calls}"
        assert held(store, path) <= written
        again = set(store.write(path if name != "captures" else tmp_path / f"{number} again"))
        assert again == written, "the disk is well again, and the next run goes on"


@pytest.mark.parametrize("name", ["ledger", "registry", "results"])
def test_a_file_that_ends_anywhere_gives_no_wrong_thing(tmp_path, name):
    store = STORES[name]
    written = set(store.write(tmp_path / "whole"))
    content = (tmp_path / "whole").read_bytes()
    cut = tmp_path / "cut"
    for size in range(0, len(content), 1 if len(content) < 1500 else 7):
        cut.write_bytes(content[:size])
        assert held(store, cut) <= written
