"""`sage capture`: record real inputs from the demo pipeline or from somebody's script."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.console import counted, say, say_left_out, stderr
from sage_plugin.cli.options import DEFAULT_FOLDER, flattened, one_of, shown_first
from sage_plugin.errors import SageError, UsageError, number_of
from sage_plugin.schema import ATTENTION, LAYOUTS

if TYPE_CHECKING:
    from sage_plugin.capture.record import CaptureRecord, LinearCapture
    from sage_plugin.capture.recording.recorder import CaptureRecorder
    from sage_plugin.capture.recording.summary import CaptureSummary
    from sage_plugin.capture.selection.options import CaptureOptions

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""For `app.command`: everything after SCRIPT belongs to the script, options too."""

DEMO_SIZES = ("small", "large")
OPTIONS = {
    *("--out", "-o", "--max-captures", "--layers", "--steps", "--heads", "--batch", "--max-bytes"),
    *("--num-steps", "--min-seq", "--overwrite", "--size", "--every", "--per-shape", "--from-pt"),
    *("--layout", "--op", "--rows"),
}
"""Of this command, which belong before the script."""

OF_RUNS = {
    "layers": "--layers", "steps": "--steps", "every": "--every", "per_shape": "--per-shape",
    "total_steps": "--num-steps", "min_seq": "--min-seq", "ops": "--op", "rows": "--rows",
}  # fmt: skip
"""What chooses among the calls of a run, by the field of `CaptureOptions`."""

logger = logging.getLogger(__name__)

Script = Annotated[
    Path | None,
    typer.Argument(help="Python file to run and record from; the demo pipeline if left out."),
]
Args = Annotated[list[str] | None, typer.Argument(help="Arguments of the script, untouched.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of the captures.")]
FromPt = Annotated[
    Path | None,
    typer.Option(
        "--from-pt",
        metavar="FOLDER",
        help="Take over *.pt files of q, k, v instead.",
    ),
]
PtLayout = Annotated[
    str | None, typer.Option("--layout", help="Of such files that do not say: bhsd or bshd.")
]
Size = Annotated[
    str | None, typer.Option(help="Demo size, small or large (default: large on a GPU).")
]


@dataclass(frozen=True, slots=True)
class SelectionOptions:
    """Which calls are recorded, and how much of each."""

    max_captures: Annotated[
        int, typer.Option(min=1, help="Most captures of each op, at any time.")
    ] = 10
    layers: Annotated[
        list[str] | None, typer.Option(help="Glob of layer paths; repeatable, or with commas.")
    ] = None
    steps: Annotated[str | None, typer.Option(help="Denoising steps, such as 0,5,10-14.")] = None
    every: Annotated[int, typer.Option(help="Of the steps, every N-th: 2 is every second one.")] = 1
    per_shape: Annotated[int | None, typer.Option(help="Most captures of calls of one shape.")] = (
        None
    )
    heads: Annotated[
        str | None, typer.Option(help="Number of key heads, or indices such as 0,5,8-11 (or 3,).")
    ] = None
    batch: Annotated[str | None, typer.Option(help="Batch items, such as 0 or 0,1.")] = None
    max_bytes: Annotated[
        str, typer.Option(help="Most bytes of the folder; heads are left out to hold it.")
    ] = "4GiB"
    num_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Denoising steps: of the demo, or those that the script runs."),
    ] = None
    min_seq: Annotated[
        int, typer.Option(min=0, help="Calls with fewer queries or keys, or rows, are not saved.")
    ] = 2
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the captures in the folder.")
    ] = False
    op: Annotated[
        str,
        typer.Option(
            "--op", help="attention, linear, grouped_linear, paged_attention, or several."
        ),
    ] = ATTENTION
    rows: Annotated[
        int, typer.Option(min=1, help="Most rows of a linear's input, or of paged queries.")
    ] = 1024

    def checked(self) -> CaptureOptions:
        """Return them as the library has them; an error names the option."""
        from sage_plugin.capture.selection.options import CaptureOptions, parse_bytes

        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given |= {"total_steps": given.pop("num_steps"), "ops": given.pop("op")}
        with _of_options():
            sizes = {"layers": self.layers or "*", "max_bytes": parse_bytes(self.max_bytes)}
            return CaptureOptions(**(given | sizes))


EXAMPLES = (
    "sage capture --max-captures 4 my_script.py --its-own options",
    "sage capture --size small --num-steps 2 --max-captures 4",
    "sage capture --op attention,linear --out both my_script.py",
)


@shown_first("out", "max_captures", "overwrite")
@flattened
def command(
    selection: SelectionOptions,
    script: Script = None,
    args: Args = None,
    out: Out = DEFAULT_FOLDER,
    size: Size = None,
    from_pt: FromPt = None,
    layout: PtLayout = None,
) -> None:
    """Record real inputs during inference, spread over layers and denoising steps."""
    options = selection.checked()
    if from_pt is not None:
        if script is not None:
            raise UsageError(f"--from-pt {from_pt} runs nothing: leave {script} out")
        _convert(from_pt, out, options, size, layout or "bhsd")
    elif layout is not None:
        raise UsageError("--layout is of --from-pt: recorded calls say how they lie")
    elif script is None:
        _report(_record_demo(out, options, size), out, options)
    elif size is not None:
        raise UsageError("--size is of the demo pipeline; give the script its own options after it")
    else:
        _record_script(script, args or [], out, options)


def _convert(
    folder: Path, out: Path, options: CaptureOptions, size: str | None, layout: str
) -> None:
    """Take over the tensors of somebody's `.pt` files, and say what could not be."""
    from sage_plugin.capture.recording import pt_files

    usual = {field.name: field.default for field in dataclasses.fields(options)}
    for name in OF_RUNS:
        if getattr(options, name) != usual[name]:
            raise UsageError(f"--from-pt {folder} runs nothing: leave {OF_RUNS[name]} out")
    if size is not None:
        raise UsageError(f"--from-pt {folder} runs nothing: leave --size out")
    one_of("--layout", layout, LAYOUTS)
    done = pt_files.convert(folder, out, options, layout=layout)
    say_left_out(done.problems)
    say(
        f"Took over {len(done.records)} of {done.found} files into {out}",
        f"Next: sage tune {shlex.quote(str(out))}",
    )


def _record_demo(out: Path, options: CaptureOptions, size: str | None) -> CaptureSummary:
    """Draw one digit with the embedded model and record from it."""
    import torch

    from sage_plugin.capture.recording.recorder import CaptureRecorder
    from sage_plugin.demo import SIZES, load_pipeline

    gpu = torch.cuda.is_available()
    if size is not None and size not in DEMO_SIZES:
        raise UsageError(f"--size {size!r}: allowed are {', '.join(DEMO_SIZES)}")
    chosen = size or ("large" if gpu else "small")
    total = options.total_steps or SIZES[chosen].default_steps
    recorder = CaptureRecorder(out, dataclasses.replace(options, total_steps=total))
    title = f"denoising steps of the demo ({chosen})"
    with _recording(recorder), counted(title, total) as advance:
        pipe = load_pipeline(
            device="cuda" if gpu else "cpu", dtype=torch.bfloat16 if gpu else torch.float32
        )
        pipe.set_progress_bar_config(disable=True)
        recorder.observe(pipe)
        pipe(
            3,
            size=chosen,
            num_inference_steps=total,
            generator=torch.Generator().manual_seed(0),
            callback_on_step_end=advance,
        )
    return recorder.summary


def _record_script(script: Path, args: list[str], out: Path, options: CaptureOptions) -> None:
    """Run a script, record from what it runs, and report; its own failure is passed on."""
    from sage_plugin.capture.recording.recorder import CaptureRecorder
    from sage_plugin.capture.recording.script import check_script, run_script

    check_script(script)
    _note_misplaced(script, args)
    recorder = CaptureRecorder(out, options, on_save=_show_saved)
    with _recording(recorder):
        end = run_script(script, args, recorder)
    if end.traceback:
        stderr.print(end.traceback, markup=False, highlight=False, end="")
    summary = recorder.summary
    failure = f"the script {script} failed by itself (status {end.status}"
    failure += ", its own error is above)" if end.traceback else ")"
    if end.status and not summary.files:
        raise UsageError(f"{failure} before anything was recorded: {summary.why_nothing()}")
    _report(summary, out, options)
    if end.status:
        raise SageError(
            f"{failure}; what was recorded until then is kept: "
            f"{number_of(summary.files, 'capture')} in {out}"
        )


@contextlib.contextmanager
def _of_options() -> Iterator[None]:
    """Name an option where the library names its argument."""
    try:
        yield
    except UsageError as error:
        name, colon, rest = str(error).partition(":")
        option = f"--{'max-bytes' if name == 'bytes' else name.replace('_', '-')}"
        raise UsageError(f"{option}{colon}{rest}" if option in OPTIONS else str(error)) from None


def _note_misplaced(script: Path, args: list[str]) -> None:
    """Say which options of ours the script got, but for those that its text names."""
    try:
        text = script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return  # running it says why
    given = {arg.split("=")[0] for arg in args} & OPTIONS
    if ours := sorted(option for option in given if option not in text):
        say(
            f"note: {ours[0]} stands behind {script} and went to the script; where it is meant for "
            f"sage, write sage capture {ours[0]} ... {script}",
            to_stderr=True,
        )


@contextlib.contextmanager
def _recording(recorder: CaptureRecorder) -> Iterator[None]:
    """An open recorder; Ctrl-C keeps what it has."""
    recorder.open()
    with contextlib.closing(recorder):
        try:
            yield
        except KeyboardInterrupt:
            summary = recorder.summary
            if summary.files:
                kept = number_of(summary.files, "capture")
                say(f"interrupted: {kept} kept in {summary.folder}", to_stderr=True)
            raise


def _show_saved(record: CaptureRecord) -> None:
    logger.info("saved %s: %s, step %d", record.file, record.layer, record.step)


def _report(summary: CaptureSummary, out: Path, options: CaptureOptions) -> None:
    """What came out, where it is, and what to run next."""
    if not summary.files:
        raise UsageError(f"nothing was recorded: {summary.why_nothing()}")
    lines = [
        f"Recorded {number_of(summary.files, 'capture')} ({summary.bytes / 1e6:.1f} MB) in {out}: "
        f"{len(summary.layers_saved)} of {len(summary.layers)} layers, "
        f"{len(summary.steps_saved)} of {max(summary.steps.values())} steps",
        f"Counted {summary.calls_seen} {summary.words} calls",
    ]
    lines += _parts(out, options)
    for op in summary.ops:
        lines.append(f"Next: {_next_with(op, shlex.quote(str(out)))}")
    say(*lines)


def _next_with(op: str, out: str) -> str:
    """The command to run on captures: an emulation other than attention's has nothing to tune."""
    from sage_plugin import device as devices

    if op == ATTENTION:
        return f"sage tune {out}"
    if devices.chosen(None)[1].kind == "cpu":
        return f"sage bench {out} --op {op}; sage tune {out} --op {op} where there is a GPU"
    return f"sage tune {out} --op {op}"


def _parts(out: Path, options: CaptureOptions) -> list[str]:
    """Which part of their calls the captures hold, and what comes of it."""
    from sage_plugin.capture.record import AttentionCapture, LinearCapture, PagedCapture
    from sage_plugin.capture.store.reader import open_captures

    every = open_captures(out).records
    lines = list(_linear_parts([one for one in every if isinstance(one, LinearCapture)]))
    paged = [one for one in every if isinstance(one, PagedCapture)]
    if drawn := [one for one in paged if not one.holds_pages]:
        lines.append(
            f"{number_of(len(drawn), 'capture')} of {len(paged)} of paged attention hold no pages, "
            "which are larger than --max-bytes leaves for one: they are drawn by recorded mean and "
            "deviation"
        )
    records = [one for one in every if isinstance(one, AttentionCapture)]
    if not records:
        return lines
    wanted = options.rule().heads
    most = max(record.shape.heads_k for record in records)
    if isinstance(wanted, int) and wanted > most:
        lines.append(f"--heads {wanted}: the calls have {most} key heads, and all are recorded")
    parts = {
        f"{len(r.head_indices)} of {r.shape.heads_k} key heads and {len(r.batch_indices)} of "
        f"{r.shape.batch} batch items"
        for r in records
        if len(r.head_indices) < r.shape.heads_k or len(r.batch_indices) < r.shape.batch
    }
    if parts:
        lines.append(
            f"Captures hold {' or '.join(sorted(parts))}: errors are judged on those, and times "
            "are taken at full shape on a GPU"
        )
    return lines


def _linear_parts(records: Sequence[LinearCapture]) -> Iterator[str]:
    """What is left out of captures of linears."""
    if rows := sorted({f"{one.rows} of {one.shape.rows}" for one in records if one.is_partial}):
        yield (
            f"Captures of linears hold {' or '.join(rows[:3])}{', ...' if rows[3:] else ''} rows: "
            "errors are judged on those, and times are taken at full shape on a GPU"
        )
    if lone := [one for one in records if not one.weight_file]:
        yield (
            f"{number_of(len(lone), 'capture')} of linears have no weight beside them and cannot "
            f"be replayed, first {lone[0].layer}: weights are larger than --max-bytes leaves for "
            "one capture"
        )
