"""What the tables and the closing sentence of `sage bench` say, on rows whose numbers are known."""

from __future__ import annotations

import dataclasses
import io

import pytest

from sage_plugin.bench.difference import OutputDifference, Spread
from sage_plugin.bench.rows import EMULATION_NOTE, Table
from sage_plugin.cli.bench.table import as_markdown, render
from sage_plugin.cli.bench.verdict import verdict
from sage_plugin.cli.console import Console
from sage_plugin.schema import Timing
from tests.bench.test_report import ERRORS, SHAPE, row_of
from tests.registry.samples import FACTS, TOOLCHAIN


def timed(ms):
    return Timing(ms, 0.9 * ms, 1.1 * ms, 30, "events")


SDPA = row_of(
    kernel="sdpa", variant="host", gate=(), reference="", speedup=None, time=timed(3.0), config=None
)
SAGE = row_of(gate=(), reference="", speedup=None, time=timed(2.0))
FAST = row_of(
    kernel="fav3_sage", variant="hopper", gate=(), reference="", speedup=None, time=timed(1.0)
)
WRONG = dataclasses.replace(FAST, kernel="fav3_fp8", time=timed(0.5), gate=("too wrong",))
PAIRED = {"reference": "fav2:portable", "speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6}
EMULATED = {"variant": "emulation", "note": EMULATION_NOTE}

PLAIN = dataclasses.replace(
    SAGE, kernel="fav2", kernel_time=None, errors=dataclasses.replace(ERRORS, centred_rel_l1=0.0),
    **EMULATED,
)  # fmt: skip


def table(*rows):
    return Table("one", SHAPE, rows, "clean", None, None, None)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ((SDPA, SAGE, FAST),
         "fav3_sage:hopper is 3.00 times as fast as sdpa, centred error 0.0300; all accuracy gates "
         "pass."),
        ((SDPA, SAGE, WRONG),
         "sage:portable is 1.50 times as fast as sdpa, centred error 0.0300; gates fail for "
         "fav3_fp8:hopper."),
        ((dataclasses.replace(SAGE, **PAIRED),),
         "sage:portable is 1.50 times as fast as fav2:portable (1.40 to 1.60), centred error "
         "0.0300; all accuracy gates pass."),
        ((SDPA, dataclasses.replace(SAGE, **EMULATED), PLAIN),
         "No speed on a CPU, where kernels are emulated. Most exact of those that quantize: sage "
         "(centred error 0.0300). All accuracy gates pass."),
        ((dataclasses.replace(SDPA, kernel="bf16"),
          dataclasses.replace(SAGE, kernel="int8_row", kernel_time=None, **EMULATED)),
         "No speed on a CPU, where kernels are emulated. Most exact of those that quantize: "
         "int8_row (centred error 0.0300). All accuracy gates pass."),
        ((SDPA,), "All accuracy gates pass."),
        ((SDPA, dataclasses.replace(WRONG, **EMULATED)),
         "No speed on a CPU, where kernels are emulated. Gates fail for fav3_fp8:emulation."),
    ],
)  # fmt: skip
def test_the_sentence_names_the_fastest_that_passes(rows, sentence):
    assert verdict([table(*rows)]) == sentence


def test_over_several_inputs_speed_is_the_geometric_mean_and_the_error_the_worst():
    worse = dataclasses.replace(ERRORS, centred_rel_l1=0.04)
    second = [dataclasses.replace(SDPA, time=timed(12.0)), dataclasses.replace(FAST, errors=worse)]
    found = verdict([table(SDPA, FAST), table(*second)])
    assert found.startswith("fav3_sage:hopper is 6.00 times as fast as sdpa, centred error 0.0400;")


def shown(renderable, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    return console.file.getvalue()


@pytest.mark.parametrize("summary", [False, True])
def test_a_speed_over_what_is_emulated_is_none(summary):
    reference = row_of(
        kernel="fav2", gate=(), speedup=None, **EMULATED | {"reference": "fav2:emulation"}
    )
    host = dataclasses.replace(SDPA, reference="fav2:emulation", speedup=4.68)
    one = table(reference, host)
    text = shown(render([one] * (1 + summary), ("time",), width=80))
    assert "speed-up" in text
    assert "4.68" not in text
    real = table(row_of(kernel="fav2", gate=(), speedup=None), dataclasses.replace(host, **PAIRED))
    text = shown(render([real] * (1 + summary), ("time",), width=80))
    assert "1.50x" in text


ROWS = (
    dataclasses.replace(SDPA, **PAIRED),
    dataclasses.replace(SAGE, **PAIRED),
    dataclasses.replace(WRONG, **PAIRED),
)
SPREAD = Spread(-1.0, 1.0, 0.01, 0.5, 0)
DIFFERENCE = OutputDifference((1, 2), SPREAD, SPREAD, SPREAD, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0)
ALL = ("time", "throughput", "bandwidth", "arithmetic_intensity")


@pytest.mark.parametrize("width", [40, 80, 160])
def test_every_column_fits_the_terminal_whole(width):
    compared = dataclasses.replace(ROWS[1], difference=DIFFERENCE)
    text = shown(render([table(SDPA, compared), table(*ROWS)], ALL, width=width), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert "All 2 inputs, worst errors; speed-up over fav2:portable" in " ".join(text.split())
    heads = {word for line in text.splitlines() for word in line.split()}
    assert heads >= {"±", "alone", "GB/s", "FLOP/B", "speed-up", "L1", "centred", "gate", "NaN/Inf"}


def test_what_holds_for_all_inputs_is_said_once_and_what_does_not_below_its_own():
    other = dataclasses.replace(SDPA, time=dataclasses.replace(SDPA.time, n=7))
    text = shown(render([table(SDPA), table(other)], ("time",), width=160), 160)
    assert text.count("method events") == 1
    first, second = text.index("30 samples"), text.index("7 samples")
    assert first < second < text.index("All 2 inputs") < text.index("method events")


def test_markdown_has_the_columns_the_sentence_and_the_machine():
    text = as_markdown([table(*ROWS)], ("time",), FACTS, TOOLCHAIN)
    head = next(line for line in text.splitlines() if line.startswith("| kernel"))
    assert head.startswith("| kernel | time ms | ± | alone | speed-up | ")
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[0] for row in rows] == [
        "| sdpa", "| sage:portable", "| fav3_fp8:hopper"
    ]  # fmt: skip
    assert all(row.count("|") == head.count("|") for row in rows)
    assert "- gate: fav3_fp8:hopper: too wrong" in text
    assert verdict([table(*ROWS)]) in text
    assert f"{FACTS.name} ({FACTS.slug})" in text
