"""SIGTERM as Ctrl-C: a batch system's time limit ends a session in order."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class Terminated(KeyboardInterrupt):
    """Somebody asked this process to end."""


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Raise `Terminated` in the main thread where SIGTERM comes; elsewhere change nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_signal: int, _frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
