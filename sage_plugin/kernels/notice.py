"""Warnings that are said once in a process; what comes again goes to the log's details."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable

_said: set[Hashable] = set()
_lock = threading.Lock()


def warn_once(logger: logging.Logger, what: Hashable, message: str, *args: object) -> None:
    """Log a warning, or only a debug message where a warning of `what` was logged before.

    Example:
        >>> forget()
        >>> log = logging.getLogger("sage_plugin.example")
        >>> warn_once(log, "example", "said %s", "once")
    """
    with _lock:
        first = what not in _said
        _said.add(what)
    logger.log(logging.WARNING if first else logging.DEBUG, message, *args)


def forget() -> None:
    """Let everything be said again."""
    with _lock:
        _said.clear()
