"""Jobs that a child process can run: each does one thing that a bad candidate does."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


class OutOfResources(Exception):
    """Named as Triton's."""


OutOfResources.__module__ = "triton.runtime.errors"


def answer() -> int:
    return 42


def pid() -> int:
    return os.getpid()


def raise_value_error() -> None:
    raise ValueError("block_n 64 is not what it seems")


def raise_runtime_error() -> None:
    raise RuntimeError("an illegal memory access was encountered")


def raise_out_of_resources() -> None:
    raise OutOfResources("shared memory, required 1180000, limit 232448")


def segfault() -> None:
    ctypes.string_at(0)


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_one() -> None:
    os._exit(1)


def say_hello() -> str:
    os.write(1, b"hello on stdout\n")
    os.write(2, b"hello on stderr\n")
    return os.getcwd()


@dataclass(frozen=True)
class Hang:
    """Starts a child of its own, writes both pids down, and never ends."""

    pids: Path

    def __call__(self) -> None:
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.pids.write_text(f"{os.getpid()} {grandchild.pid}")
        time.sleep(600)


@dataclass(frozen=True)
class DieOnce:
    """Kills its process the first time only."""

    marker: Path

    def __call__(self) -> str:
        if not self.marker.exists():
            self.marker.touch()
            kill_itself()
        return "survived"


@dataclass(frozen=True)
class Environment:
    """Says what a child sees of a variable."""

    name: str

    def __call__(self) -> str | None:
        return os.environ.get(self.name)
