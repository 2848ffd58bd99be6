"""Several processes and threads at one file, and processes that are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.registry_writer import write
from tests.faults.stores import STORES

FORK = multiprocessing.get_context("fork")
WRITERS, EACH = 16, 2
MOMENTS = 25


def test_sixteen_writers_of_one_registry_file_lose_nothing(tmp_path):
    """Processes take turns by the lock, threads of one process too; readers see whole files."""
    path = tmp_path / "attention.json"
    of_threads, first = set(range(WRITERS)), 1000
    starts = range(first, first + WRITERS * EACH, EACH)
    processes = [FORK.Process(target=write, args=(path, start, EACH)) for start in starts]
    for process in processes:
        process.start()
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda number: write(path, number, 1), of_threads))
    while any(process.is_alive() for process in processes):
        assert STORES["registry"].read(path) >= of_threads
    assert [process.exitcode for process in processes] == [0] * WRITERS
    expected = of_threads | set(range(first, first + WRITERS * EACH))
    assert STORES["registry"].read(path) == expected
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("name", STORES)
def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path, name):
    """Killed at moments all over its work; what it told is there, and the next one goes on."""
    store, whole = STORES[name], 0.0
    for moment in range(MOMENTS):
        path = tmp_path / f"{moment}"
        taken_s, told = killed(store, path, whole * moment / MOMENTS if moment else None)
        whole = whole or taken_s
        if told:
            assert store.read(path) >= told
        again = path if name != "captures" else Path(f"{path} again")
        assert set(store.write(again)) >= told


def killed(store, path, after_s):
    """Write in a process of its own, killed after some time; how long it ran, and what it told."""
    read_end, write_end = os.pipe()
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        for one in store.write(path):
            os.write(write_end, f"{one}\n".encode())
        os._exit(0)
    os.close(write_end)
    if after_s is not None:
        time.sleep(after_s)
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(read_end) as told:
        return time.monotonic() - begun, {int(line) for line in told}
