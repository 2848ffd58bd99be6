"""Shared by all tests: without a GPU, Triton kernels run in its interpreter with correct casts."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.slow import is_slow, is_swept
from tests.visible_gpus import rotate

rotate()

import torch  # noqa: E402

hypothesis.settings.register_profile("whatever the load", deadline=None)
hypothesis.settings.load_profile("whatever the load")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test-fast` leaves out, and what `make test` does."""
    for item in items:
        if is_slow(item.nodeid):
            item.add_marker(pytest.mark.slow)
        if is_swept(item.nodeid):
            item.add_marker(pytest.mark.sweep)


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    """Warnings that are said once in a process are said in each test."""
    from sage_plugin.kernels import notice

    notice.forget()


@pytest.fixture
def no_graphs() -> Iterator[None]:
    """Nothing is compiled before the test, and nothing of it is left."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def interpreted() -> None:
    """Run portable kernels in Triton's interpreter, with casts as a GPU does them."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU here; tests/gpu covers them")
    from tests.interpreter import correct_casts

    correct_casts()


@pytest.fixture(scope="session")
def nowhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Names of folders that do not exist; a folder a test would cost more than most tests."""
    base = tmp_path_factory.mktemp("nowhere")
    return (base / str(number) for number in itertools.count())


@pytest.fixture
def unconfigured(monkeypatch: pytest.MonkeyPatch, nowhere: Iterator[Path]) -> Iterator[None]:
    """Launch configs from the defaults and the shipped files alone, and nothing remembered."""
    from sage_plugin.kernels import launch_config

    for name in ("CONFIG_DIR", "KERNEL", "VARIANT", "LAUNCH"):
        monkeypatch.delenv(f"SAGE_PLUGIN_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(next(nowhere)))
    launch_config.forget()
    yield
    launch_config.forget()


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let work be planned for a card that is not here; a script has to run in place of it."""
    from sage_plugin import device as devices
    from tests.registry.samples import FACTS

    monkeypatch.setattr(devices, "chosen", lambda _: (torch.device("cuda:0"), FACTS))


@pytest.fixture
def nan_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what is allocated without a value with NaN, so that unwritten memory shows."""

    def poisoning(stock):
        def empty(*size, **options):
            out = stock(*size, **options)
            return _poisoned(out) if out.dim() and out.numel() and not out.is_meta else out

        return empty

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))


def _poisoned(out: torch.Tensor) -> torch.Tensor:
    if out.dtype == torch.int8:
        return out.fill_(-128)
    if out.element_size() == 1:
        out.view(torch.uint8).fill_(0x7F)
        return out
    return out.fill_(math.nan if out.is_floating_point() else 1 << 30)
