"""The search of a policy: replay the captures on every option, choose, predict the result."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sage_plugin import device as devices
from sage_plugin import files
from sage_plugin.capture.selection.reduce import pick
from sage_plugin.capture.store.reader import CaptureFolder, open_captures
from sage_plugin.errors import CaptureError, TuningError, UsageError
from sage_plugin.plugin.linears.smoothing import read as read_smoothing
from sage_plugin.plugin.options.checked import MIN_SEQ
from sage_plugin.plugin.policy.rules import (
    BASELINES,
    HOST,
    SCHEMA_VERSION,
    Policy,
    PredictedRun,
    Prediction,
    Rule,
    checked,
)
from sage_plugin.schema import ATTENTION, LINEAR, AnyShape, DeviceFacts
from sage_plugin.tune.policy import sensitivity_file, times_file
from sage_plugin.tune.policy.choice import Assignment, PolicyProblem
from sage_plugin.tune.policy.estimates import Judged, estimated, worst_of
from sage_plugin.tune.policy.evidence import PolicyEvidence
from sage_plugin.tune.policy.grid import Grid, Place, PolicyCell, grid_of
from sage_plugin.tune.policy.option import Option, default_options
from sage_plugin.tune.policy.request import PolicyRequest
from sage_plugin.tune.policy.rules import rules_of
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.study import digest

MAX_TIMED = 12
"""Shapes that are timed, the most expensive ones; others go by the nearest of them."""

SEARCHED = (ATTENTION, LINEAR)
"""Op families whose kernels are chosen layer by layer; both products of experts have one."""

Progress = Callable[[str, int, int], None]
"""Called with what is done, how many of them are, and how many there are."""


@dataclass(frozen=True, slots=True)
class PolicySearchResult:
    """What a search came to.

    `problem` holds what was estimated, `assignment` what was chosen, `front` goes from no error to
    the most, `prediction` compares them with the baseline and each option everywhere; `grids` are
    those of the op families, which share one budget.
    """

    policy: Policy
    prediction: Prediction
    problem: PolicyProblem
    assignment: Assignment
    front: tuple[Assignment, ...]
    grids: tuple[Grid, ...]
    device: str
    judged: int
    notes: tuple[str, ...]
    seconds: float
    run_folder: Path


@dataclass(slots=True)
class _Search:
    """One search, step by step."""

    request: PolicyRequest
    captures: CaptureFolder
    grids: tuple[Grid, ...]
    options: tuple[Option, ...]
    evidence: PolicyEvidence
    elsewhere: times_file.Times | None
    progress: Progress
    notes: list[str] = field(default_factory=list)
    judged: int = 0

    def cells(self) -> tuple[PolicyCell, ...]:
        """Estimate every option in every cell."""
        times = self.times()
        return tuple(
            cell
            for grid in self.grids
            for cell in estimated(grid, self.judged_cells(grid), times, self.of(grid))
        )

    def of(self, grid: Grid) -> tuple[Option, ...]:
        """Return the options of a grid's op family."""
        return tuple(option for option in self.options if option.op == grid.op)

    def judged_cells(self, grid: Grid) -> dict[Place, Judged]:
        """Judge every option on the captures of every cell."""
        options = self.of(grid)
        chosen = {
            place: pick(cell.records, self.request.captures_per_cell)
            for place, cell in grid.captured.items()
        }
        total = self.judged + sum(map(len, chosen.values()))
        found: dict[Place, Judged] = {}
        for place, records in chosen.items():
            values: dict[str, list[float | str]] = {option.label: [] for option in options}
            sound = []
            for record in records:
                self.judged += 1
                self.progress("captures judged", self.judged, total)
                try:
                    judged = {o.label: self.evidence.error(record, o) for o in options}
                except CaptureError as error:
                    self.notes.append(f"left out: {error}")
                    continue
                sound.append(record.file)
                for label, error_or_reason in judged.items():
                    values[label].append(error_or_reason)
            if sound:
                worst = {label: worst_of(errors) for label, errors in values.items()}
                found[place] = (tuple(sound), worst)
        self._note_refusals(found, options)
        return found

    def times(self) -> dict[AnyShape, dict[str, float]]:
        """Return milliseconds of a call of each shape on every option that can run it."""
        shapes = [shape for grid in self.grids for shape in grid.shapes]
        if self.elsewhere is None:
            known = self._measured([s for grid in self.grids for s in grid.shapes[:MAX_TIMED]])
        else:
            known = self.elsewhere
        times = {shape: times_file.scaled(known, shape) for shape in shapes}
        if scaled := sum(shape not in known for shape in shapes):
            self.notes.append(
                f"{scaled} of {len(shapes)} call shapes take their times from the nearest one"
            )
        if untimed := sum(BASELINES[s.family] not in row for s, row in times.items()):
            self.notes.append(
                f"{untimed} of {len(shapes)} call shapes have no times and stay with the host's own"
            )
        return times

    def _measured(self, shapes: Sequence[AnyShape]) -> times_file.Times:
        records = {r.shape: r for r in self.captures.records}
        found = {}
        for number, shape in enumerate(shapes, start=1):
            options = [option for option in self.options if option.op == shape.family]
            found[shape] = self.evidence.times(shape, records.get(shape), options)
            self.progress("shapes timed", number, len(shapes))
        return found

    def _note_refusals(self, found: dict[Place, Judged], options: Sequence[Option]) -> None:
        for option in options:
            values = [errors[option.label] for _, errors in found.values()]
            reasons = [value for value in values if isinstance(value, str)]
            if reasons:
                self.notes.append(
                    f"{option.label} is out in {len(reasons)} of {len(found)} captured cells, "
                    f"first because {reasons[0]}"
                )


def search(
    request: PolicyRequest, progress: Progress = lambda what, done, total: None
) -> PolicySearchResult:
    """Search a policy; measurements go to the run folder, and a later search goes on from them.

    Args:
        request: what is searched for.
        progress: called with how far it is.

    Raises:
        UsageError: an option is out of range, or a CPU without times of a GPU.
        CaptureError: the folder has no captures, or not what a policy is searched by.
        ConfigError: a file of times or sensitivities is not one.
        TuningError: nothing meets what was asked for.
        OutputError: the run folder cannot be written.
    """
    started = time.monotonic()
    request.check()
    place, facts = devices.chosen(request.device)
    if facts.kind == "cpu" and not request.times:
        raise UsageError(
            "on a CPU kernels are emulated, so that their times say nothing: search on the GPU, or "
            "give its times (`sage bench captured_inputs --json times.json` there, --times here)"
        )
    captures = open_captures(request.folder)
    grids = _grids(request, captures)
    device, elsewhere = facts.name, None
    if request.times:
        device, elsewhere = times_file.read(*request.times)
    measured = None if request.sensitivity is None else sensitivity_file.read(request.sensitivity)
    smoothing = None if request.smoothing is None else read_smoothing(request.smoothing)
    options = _options(request, facts, grids, elsewhere)
    folder = request.runs_dir / (request.run_name or _run_name(captures, facts))
    config_dir = None if request.config_dir is None else str(request.config_dir)
    with run_folder.claimed(folder):
        if request.fresh:
            run_folder.set_aside(folder)
        ledger = folder / run_folder.LEDGER
        evidence = PolicyEvidence(captures, str(place), config_dir, ledger, smoothing)
        running = _Search(request, captures, grids, options, evidence, elsewhere, progress)
        running.notes += captures.problems
        if others := sorted({r.family for r in captures.records} - set(SEARCHED)):
            running.notes.append(f"captures of {', '.join(others)} are left out")
        if request.min_seq < MIN_SEQ:
            running.notes.append(
                f"calls of fewer than {MIN_SEQ} queries or keys follow the policy only with "
                f"patch(min_seq={request.min_seq})"
            )
        cells = running.cells()
    if not cells:
        where = " and ".join(map(str, request.times))
        raise TuningError(
            f"no call of {request.folder} has times"
            + (f": {where} was measured on other shapes" if where else "")
        )
    if measured is not None:
        cells = sensitivity_file.weighted(measured, cells, str(request.sensitivity))
        running.notes.append(
            f"errors are weighted by the sensitivity of the clip, as {request.sensitivity} says"
        )
    total = sum(grid.total_calls for grid in grids)
    words = " and ".join(f"{grid.op}s" if grid.op == LINEAR else grid.op for grid in grids)
    problem = PolicyProblem(cells, total, request.max_layer_error, words)
    if request.max_ms is not None:
        assignment = problem.least_error(request.max_ms)
    else:
        assignment = problem.most_saved(request.max_error or 0.0)
    files.write_json(folder / run_folder.RESULTS, problem.to_json(assignment))
    prediction = _prediction(problem, assignment, grids, options, device)
    policy = _policy(captures, problem, assignment, grids, options, prediction)
    if policy.smooths:
        policy = dataclasses.replace(policy, smoothing=str(Path(smoothing.path).resolve()))  # type: ignore[union-attr]  # it was asked for
    return PolicySearchResult(
        policy=policy,
        prediction=prediction,
        problem=problem,
        assignment=assignment,
        front=problem.front(),
        grids=grids,
        device=device,
        judged=running.judged,
        notes=tuple(running.notes),
        seconds=time.monotonic() - started,
        run_folder=folder,
    )


def _grids(request: PolicyRequest, captures: CaptureFolder) -> tuple[Grid, ...]:
    """A grid for each op family that was recorded, of those that kernels were asked for of."""
    asked = {Option.parse(text).op for text in request.kernels}
    recorded = [op for op in SEARCHED if any(r.family == op for r in captures.records)]
    ops = [op for op in recorded if not asked or op in asked]
    if missing := sorted(asked - set(recorded)):
        raise CaptureError(
            f"{captures.path} has no captures of {missing[0]}, which --kernel names one of: record "
            f"with `sage capture --op {','.join(SEARCHED)}`"
        )
    if not ops:
        raise CaptureError(
            f"{captures.path} has captures of {captures.records[0].family} alone, whose kernels no "
            f"search chooses: record with `sage capture --op {','.join(SEARCHED)}`"
        )
    ranges, min_seq = request.step_ranges, request.min_seq
    return tuple(grid_of(captures, step_ranges=ranges, min_seq=min_seq, op=op) for op in ops)


def _options(
    request: PolicyRequest,
    facts: DeviceFacts,
    grids: Sequence[Grid],
    elsewhere: times_file.Times | None,
) -> tuple[Option, ...]:
    """The options that were asked for, or all of the device; with files of times, those in them."""
    asked = tuple(dict.fromkeys(Option.parse(text) for text in request.kernels))
    smoothing = request.smoothing is not None
    if not smoothing and (needs := [option.label for option in asked if option.smoothing]):
        raise UsageError(
            f"--kernel {needs[0]}: give its factors with --smoothing, as `sage policy smoothing "
            f"{request.folder}` writes them"
        )
    options = asked or tuple(
        option
        for grid in grids
        for option in default_options(facts, grid.shapes[0], smoothing=smoothing)
    )
    if elsewhere is None:
        return options
    labels = {label for row in elsewhere.values() for label in row}
    if untimed := [option.label for option in asked if option.label not in labels]:
        raise UsageError(
            f"--kernel {untimed[0]}: {' and '.join(map(str, request.times))} has no times of it; "
            f"it has {', '.join(sorted(labels - set(BASELINES.values())))}"
        )
    return tuple(option for option in options if option.label in labels)


def _run_name(captures: CaptureFolder, facts: DeviceFacts) -> str:
    """A name that the same captures on the same device always get, so that a search goes on."""
    return f"policy-{facts.slug}-{digest(sorted(r.sha256 for r in captures.records))[:8]}"


def _prediction(
    problem: PolicyProblem,
    assignment: Assignment,
    grids: Sequence[Grid],
    options: Sequence[Option],
    device: str,
) -> Prediction:
    """Predict the baseline, each option everywhere, and the policy."""
    runs = [(label, *problem.single(label)) for label in (HOST, *(o.label for o in options))]
    runs.append(("policy", assignment.ms, assignment.plain_error))
    rounded = tuple(PredictedRun(name, round(ms, 4), round(e, 8)) for name, ms, e in runs)
    calls = sum(math.ceil(grid.total_calls) for grid in grids if grid.op == ATTENTION)
    return Prediction(device, grids[0].steps, calls, rounded)


def _policy(
    captures: CaptureFolder,
    problem: PolicyProblem,
    assignment: Assignment,
    grids: Sequence[Grid],
    options: Sequence[Option],
    prediction: Prediction,
) -> Policy:
    classes = {record.model_class for record in captures.records}
    chosen = list(zip(problem.cells, assignment.picks, strict=True))
    rules: list[Rule] = []
    for grid in grids:
        rules += rules_of(grid, [one for one in chosen if one[0].op == grid.op], options)
    policy = Policy(
        SCHEMA_VERSION,
        tuple(rules),
        model=classes.pop() if len(classes) == 1 else "",
        note=f"searched by `sage policy search` for {prediction.device}",
        prediction=prediction,
    )
    return checked(policy, "the searched policy")
