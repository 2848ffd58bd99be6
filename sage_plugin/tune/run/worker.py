"""A child process that runs one job after the other, and that nothing can take down with it.

The child is spawned, leads its own process group, and dies with its parent. A job that crashes it,
exits, or runs past its limit ends the child's whole process tree before the next job starts; the
next job gets a new child. The child's output goes to a log file, never to the command's stdout.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from sage_plugin import settings
from sage_plugin.errors import TuningError

logger = logging.getLogger(__name__)

SPAWN = multiprocessing.get_context("spawn")
START_S = 300.0
"""A child that has not imported its modules by then never will."""

JOBS_PER_CHILD = 64
"""Compiled kernels stay in a process for its life; ending it is the one sure way to free them."""

MAX_MESSAGE = 4000

Job = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a job.

    Attributes:
        status: `"done"`, `"raised"`, `"crashed"` or `"timeout"`.
        value: what the job returned, where it is done.
        error: class of what it raised, with its module.
        message: the exception's text, or how the child ended.
    """

    status: str
    value: Any = None
    error: str = ""
    message: str = ""


class WorkerProcess:
    """One child at a time, one job at a time: jobs that are timed never share the device."""

    def __init__(
        self,
        *,
        timeout_s: float,
        log: Path | None = None,
        preload: str | None = None,
        jobs_per_child: int = JOBS_PER_CHILD,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.started = 0
        self._log, self._preload, self._jobs_per_child = log, preload, jobs_per_child
        self._process: SpawnProcess | None = None
        self._pipe: Connection | None = None
        self._environment = dict(environment or {})
        self._cancelled = threading.Event()
        self._jobs = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the child, `None` where there is none."""
        return None if self._process is None else self._process.pid

    def run(self, job: Job) -> Reply:
        """Run a picklable job in the child and wait for it.

        Raises:
            TuningError: no child can be started at all.
            KeyboardInterrupt: another thread called `cancel`.
        """
        if self._cancelled.is_set():
            raise KeyboardInterrupt
        if self._jobs >= self._jobs_per_child:
            self.stop()
        process, pipe = self._child()
        if self._cancelled.is_set():
            self.stop()
            raise KeyboardInterrupt
        self._jobs += 1
        try:
            pipe.send(job)
            if not wait([pipe, process.sentinel], self.timeout_s):
                self.stop()
                return Reply("timeout", message=f"ran longer than {self.timeout_s:g} s, was ended")
            reply: Reply = pipe.recv()
        except (EOFError, OSError):
            message = self._death()
            if self._cancelled.is_set():
                raise KeyboardInterrupt from None
            return Reply("crashed", message=message)
        except BaseException:  # Ctrl-C above all: the job must not run on without us
            self.stop()
            raise
        return reply

    def stop(self) -> None:
        """End the child and all that it started, and wait until they are gone."""
        process, self._process = self._process, None
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()
        if process is not None and process.pid is not None:
            # The group first: until its leader is waited for, the number cannot be another's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            process.close()
        self._jobs = 0

    def cancel(self) -> None:
        """Kill the child for good, from another thread than the one that runs jobs."""
        self._cancelled.set()
        process = self._process
        if process is not None and process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError, ValueError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the child and remove its folder."""
        self.stop()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _child(self) -> tuple[SpawnProcess, Connection]:
        if self._process is None or self._pipe is None or not self._process.is_alive():
            self.stop()
            self._process, self._pipe = self._start()
        return self._process, self._pipe

    def _start(self) -> tuple[SpawnProcess, Connection]:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(
                prefix="sage-tune-", ignore_cleanup_errors=True
            )
        ours, theirs = SPAWN.Pipe()
        log = None if self._log is None else str(self._log.resolve())
        process = SPAWN.Process(
            target=_serve,
            args=(theirs, log, self._folder.name, self._preload, self._environment),
            daemon=False,
        )
        process.start()
        theirs.close()
        self.started += 1
        self._process, self._pipe = process, ours
        try:
            ready = bool(wait([ours, process.sentinel], START_S)) and ours.recv() == "ready"
        except (EOFError, OSError):
            ready = False
        if not ready:
            where = f"; {self._log} may say why" if self._log else ""
            raise TuningError(f"a worker process could not be started: {self._death()}{where}")
        return process, ours

    def _death(self) -> str:
        """How the child ended; it is gone when this returns."""
        process = self._process
        if process is None:
            return "it is gone"
        process.join(5)
        code = process.exitcode
        self.stop()
        if code is None:
            return "the worker closed its pipe and hung"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the worker was ended by {signal.Signals(-code).name}"
        return f"the worker exited with code {code}"


def _serve(
    pipe: Connection,
    log: str | None,
    folder: str,
    preload: str | None,
    environment: Mapping[str, str],
) -> None:
    """The child: run jobs until the pipe closes."""
    settings.export(environment)
    with contextlib.suppress(OSError):
        os.setsid()
    _forbid_core_dumps()
    _redirect_output(log)
    threading.Thread(target=_die_with_parent, args=(folder,), daemon=True).start()
    if preload:
        importlib.import_module(preload)
    # A crashing driver drops files where it stands; nothing of the user's is there.
    os.chdir(folder)
    pipe.send("ready")
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(_done(job))


def _done(job: Job) -> Reply:
    try:
        return Reply("done", value=job())
    except Exception as error:  # whatever a candidate raises is a result
        kind = type(error)
        name = f"{kind.__module__}.{kind.__qualname__}"
        logger.info("job raised", exc_info=True)
        return Reply("raised", error=name, message=str(error)[:MAX_MESSAGE])


def _die_with_parent(folder: str) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _forbid_core_dumps() -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _redirect_output(log: str | None) -> None:
    target = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
