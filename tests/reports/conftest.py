"""The devices of the report tests, and an environment that asks for nothing."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from filelock import FileLock, Timeout

from tests.matrix.places import ON_GPU
from tests.reports.machine import Machine

LARGE = 32 * 2**30
"""More bytes than a test of `large_memory` holds."""
LEFT_OUT = dict.fromkeys(("test_a_layout", "test_c_masks"), ("fav3_sage", "fav3_fp8"))


def pytest_collection_modifyitems(config, items):
    """Leave kernels out of the interpreter that add nothing there.

    `fav3_sage` is Q K of `sage` and P V of `fav3_fp8`; offsets and masks are the same code in all
    quantised kernels.
    """
    given = [getattr(item, "callspec", None) for item in items]
    extra = [
        item
        for item, spec in zip(items, given, strict=True)
        if spec is not None
        and spec.params.get("machine") == "cpu"
        and Path(__file__).parent in item.path.parents
        and spec.params.get("kernel") in LEFT_OUT.get(item.path.stem, ("fav3_sage",))
    ]
    if extra:
        config.hook.pytest_deselected(items=extra)
        items[:] = [item for item in items if item not in extra]


@pytest.fixture(autouse=True)
def _alone(unconfigured):
    """No environment, no user's configs."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_GPU)])
def machine(request) -> Machine:
    """The portable kernels in Triton's interpreter, and again on a GPU."""
    if request.param == "cpu":
        request.getfixturevalue("interpreted")
    return Machine(request.param)


@pytest.fixture(params=[pytest.param("cuda", marks=ON_GPU)])
def gpu(request) -> Machine:
    """The portable kernels on a GPU alone."""
    return Machine(request.param)


@pytest.fixture
def interpreter(interpreted) -> Machine:
    """The portable kernels in Triton's interpreter alone."""
    return Machine("cpu")


@pytest.fixture
def large_memory():
    """As many tests of all processes hold gigabytes of a GPU as fit; each gives them back."""
    if not torch.cuda.is_available():
        yield
        return
    with _a_place(torch.cuda.get_device_properties(0).total_memory // LARGE):
        torch.cuda.empty_cache()
        yield
        torch.cuda.empty_cache()


@contextmanager
def _a_place(places: int) -> Iterator[None]:
    """Wait for one of the places of this machine, and hold it."""
    folder = Path(tempfile.gettempdir())
    locks = [FileLock(folder / f"sage_plugin_large_{at}.lock") for at in range(max(1, places))]
    for lock in itertools.cycle(locks):
        with suppress(Timeout):
            lock.acquire(timeout=0.1)
            break
    try:
        yield
    finally:
        lock.release()
