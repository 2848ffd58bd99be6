"""A run's folder: who works in it, and the files that are made from its ledger."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sage_plugin import files
from sage_plugin.errors import ConfigError, OutputError, UsageError
from sage_plugin.paged_records import PAGED_ATTENTION
from sage_plugin.schema import ATTENTION, GROUPED_LINEAR, LINEAR, Trial
from sage_plugin.tune.run.study import Study

logger = logging.getLogger(__name__)

LEDGER, TRIALS, FRONT = "ledger.jsonl", "trials.csv", "front.png"
RESULTS, METADATA = "results.json", "run_metadata.json"
MAX_HOLDER_BYTES = 4096
MAX_FILE_BYTES = 64 * 2**20
LOG, LOCK, HOLDER, CRASH_MARKER = "worker.log", ".lock", ".holder.json", ".in_flight.json"


def check_name(name: str | None) -> None:
    """See that a run's name can be a folder's; `None` is none that was given.

    Raises:
        UsageError: it cannot.
    """
    if name is not None and not re.fullmatch(r"\w[\w.+-]*", name):
        raise UsageError(f"--run-name {name!r}: letters, digits, '.', '+', '-' and '_' only")


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file of a run."""
    data = files.read_json(path, MAX_FILE_BYTES, "file of a run")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return data


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Work in a run folder, alone.

    A run that was killed leaves its name behind but not its lock, so the next one takes over.

    Raises:
        OutputError: the folder cannot be written, or another run works in it.
    """
    import filelock

    holder = folder / HOLDER
    with files.writing(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(folder / LOCK, timeout=0)
            lock.acquire()
        except filelock.Timeout:
            raise OutputError(
                f"{folder} is in use by {_holder(holder)}: wait for it, or name another --run-name"
            ) from None
    try:
        if os.path.lexists(holder):
            logger.warning("%s: taking over from %s, which is gone", folder, _holder(holder))
        files.write_atomically(
            holder,
            json.dumps({"pid": os.getpid(), "host": socket.gethostname()}) + "\n",
            follow=False,
        )
        yield
    finally:
        with contextlib.suppress(OSError):
            holder.unlink()
        lock.release()


def _holder(path: Path) -> str:
    try:
        data = files.read_json(path, MAX_HOLDER_BYTES, "note")
        return f"process {data['pid']} on {data['host']}"
    except (ConfigError, KeyError, TypeError):
        return "another process"


def set_aside(folder: Path) -> None:
    """Keep the ledger of an earlier run under another name, so that this one starts anew.

    What earlier sessions died at is forgotten, too.

    Raises:
        OutputError: it cannot be renamed.
    """
    with contextlib.suppress(OSError):
        (folder / CRASH_MARKER).unlink()
    ledger = folder / LEDGER
    if not os.path.lexists(ledger):
        return
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    aside = folder / f"ledger.{stamp}.{os.getpid()}-{secrets.token_hex(4)}.jsonl"
    with files.writing(folder):
        ledger.rename(aside)


def write_trials(path: Path, studies: Sequence[Study], trials: Iterable[Trial]) -> None:
    """Write the trials of some studies as a table, one row each.

    Raises:
        OutputError: it cannot be written.
    """
    by_id = {study.id: study for study in studies}
    stream = io.StringIO()
    names = list(_row_names(studies[0]))
    writer = csv.DictWriter(stream, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    for trial in trials:
        if trial.study in by_id:
            known = _known(by_id[trial.study], trial)
            writer.writerow({name: known.get(name) for name in names})
    files.write_atomically(path, stream.getvalue(), follow=False)


def git_revision() -> str:
    """Return the commit of the checkout that this package runs from, or empty."""
    import subprocess

    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


CALL = {
    ATTENTION: ("seq_q", "seq_k", "batch_heads", "head_dim", "causal"),
    LINEAR: ("rows", "in_features", "out_features"),
    GROUPED_LINEAR: ("rows", "in_features", "out_features", "groups"),
    PAGED_ATTENTION: ("kind", "tokens", "max_keys", "page_size", "gqa_ratio", "head_dim"),
}
"""The fields of keys that a table of trials has, by op family."""


def _row_names(study: Study) -> Iterator[str]:
    yield from ("study", "kernel", "variant", *CALL[study.key.family])
    yield from ("stage", "status", "reason", *study.default.__dataclass_fields__)
    yield from ("median_ms", "low_ms", "high_ms", "n", "method", "kernel_median_ms")
    yield from ("ratio", "gain", "gain_low", "gain_high", "aa_ratio")
    yield from ("registers", "spills", "smem_bytes")
    yield from ("cosine", "row_cosine_p10", "worst_head_rel_l1", "centred_rel_l1", "bad_values")


def _known(study: Study, trial: Trial) -> dict[str, object]:
    known: dict[str, object] = study.key.to_json() | trial.config.to_json() | trial.extra
    known |= {"study": trial.study, "stage": trial.stage, "status": trial.status}
    known |= {
        name: getattr(trial, name) for name in ("reason", "registers", "spills", "smem_bytes")
    }
    known |= trial.time.to_json() if trial.time else {}
    known["kernel_median_ms"] = trial.kernel_time.median_ms if trial.kernel_time else None
    # An error's `gain` (mean over mean) is not a trial's (time saved): the trial's stays.
    errors = trial.errors.to_json() if trial.errors else {}
    known |= {name: value for name, value in errors.items() if name != "gain"}
    return known
