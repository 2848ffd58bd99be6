"""Measures every kernel on real tensors and derives `sage_plugin/families/attention/gates.py`.

Three tables go into one JSON file: the errors of the kernels on every capture of the real models
and of the demo, and on random tensors; the same with each quantisation option changed; and those of
kernels with a mistake in them. `docs/accuracy.md` says how the gates follow. Needs the weights of
`tests/real/requirements.txt` and about a quarter of an hour of one CPU core.

    python benchmarks/set_gates.py --output benchmarks/results/gates.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sage_plugin import device as devices  # noqa: E402
from sage_plugin.accuracy.gate import Gate, failures, worst  # noqa: E402
from sage_plugin.measure.inputs import self_attention, synthetic  # noqa: E402
from sage_plugin.schema import ErrorMetrics, LaunchConfig  # noqa: E402
from tests.real import captured, faults, inputs, judged, rule, weights  # noqa: E402
from tests.real.captured import Captured  # noqa: E402
from tests.real.hook import Call  # noqa: E402

QUANTIZED = ("sage", "fav3_sage", "fav3_fp8")
BLOCKS = (64, 128)
"""Key blocks of the default configs of all GPUs that matter here: the granule of K's scale."""

RANDOM = (
    ("normal", 17776, 64),
    ("biased", 17776, 64),
    ("biased", 118808, 128),
    ("drift", 17776, 64),
    ("outlier", 17776, 64),
)
"""Distribution, keys and head dim, as `sage bench` draws them."""
LONGEST = "118808x128"
IN_RULE = ("normal", "biased")
ROWS = 256

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "smooth_k off": {"smooth_k": False},
    "smooth_v off": {"smooth_v": False},
    "smooth_v on": {"smooth_v": True},
    "q_granule 16": {"q_granule": 16},
    "q_granule 64": {"q_granule": 64},
    "q_granule 128": {"q_granule": 128},
    "hadamard 32": {"hadamard": 32},
    "hadamard 64": {"hadamard": 64},
    "hadamard 64, smooth_v off": {"hadamard": 64, "smooth_v": False},
}

FAULT_LAYERS = {"smollm2": (0, 10, 18, 28), "minilm": (1, 4), "whisper": (0, 3), "demo": (0,)}

Row = dict[str, Any]


def launches(kernel: str, one: Captured) -> list[LaunchConfig | None]:
    """The configs under which a kernel has to keep its gate."""
    if kernel == "sdpa":
        return [None]
    return [judged.default_launch(one, kernel).replaced(block_n=block_n) for block_n in BLOCKS]


def random_sets() -> Iterator[Captured]:
    """Random tensors with the first rows of Q alone, which is all that is judged."""
    for distribution, seq, head_dim in RANDOM:
        shape = self_attention(1, 2, seq, head_dim)
        q, k, v = synthetic(shape, device="cpu", distribution=distribution)
        call = Call(0, q[:, :, :ROWS].contiguous(), k, v, None, False, shape.scale)
        yield Captured(f"random {distribution}", f"{seq}x{head_dim}", call)


def judge(one: Captured, kernel: str, launch: LaunchConfig | None) -> ErrorMetrics:
    """Errors of one run; `sdpa` gives its output in the inputs' dtype."""
    if kernel == "sdpa":
        call = one.call
        out = torch.nn.functional.scaled_dot_product_attention(
            call.q, call.k, call.v, call.mask, is_causal=call.causal, scale=call.scale,
            enable_gqa=call.q.shape[1] != call.k.shape[1],
        )  # fmt: skip
        return judged.errors(one, out.float())
    return judged.errors(one, judged.output(one, kernel, launch=launch)[0])


def capture_rows(sets: Sequence[Captured]) -> list[Row]:
    """Errors of every kernel on every capture, the worst of its configs."""
    rows = []
    for one in sets:
        for kernel in ("sdpa", "fav2", *QUANTIZED):
            found = worst([judge(one, kernel, launch) for launch in launches(kernel, one)])
            rows.append(_row(one, kernel, found))
            say(f"{one.name:48} {kernel:10} {found.worst_head_rel_l1:.4f}")
    return rows


def option_rows(sets: Sequence[Captured]) -> list[Row]:
    """Median and worst errors of each model under each option."""
    rows = []
    for kernel in QUANTIZED:
        for option, changes in OPTIONS.items():
            if option != "default" and _changed(kernel, sets[0], changes) is None:
                continue
            for model in dict.fromkeys(one.model for one in sets):
                found = [
                    judge(
                        one,
                        kernel,
                        _changed(kernel, one, changes) or judged.default_launch(one, kernel),
                    )
                    for one in sets
                    if one.model == model
                ]
                rows.append(_option_row(kernel, option, model, found))
                say(f"{kernel:10} {option:26} {model:16} {rows[-1]['worst_head_rel_l1']:.4f}")
    return rows


def _changed(kernel: str, one: Captured, changes: Row) -> LaunchConfig | None:
    """The default with an option changed, `None` where that is the default."""
    default = judged.default_launch(one, kernel)
    changed = default.replaced(**changes)
    changed = changed.replaced(hadamard=min(changed.hadamard, one.call.q.shape[3]))
    return None if changed == default else changed


def _option_row(kernel: str, option: str, model: str, found: Sequence[ErrorMetrics]) -> Row:
    everything = worst(found)
    return {
        "kernel": kernel,
        "option": option,
        "model": model,
        "median_rel_l1": statistics.median(m.rel_l1 for m in found),
        "median_centred_rel_l1": statistics.median(m.centred_rel_l1 for m in found),
        "worst_head_rel_l1": everything.worst_head_rel_l1,
        "worst_head_cosine": everything.worst_head_cosine,
        "centred_rel_l1": everything.centred_rel_l1,
    }


def fault_rows(gates: dict[str, Gate], drawn: Sequence[Captured]) -> list[Row]:
    """Errors of kernels with a mistake, the worst of some inputs, and which the gate refuses."""
    sets = list(drawn) + [
        captured.captured(model)[layer]
        for model, layers in FAULT_LAYERS.items()
        for layer in layers
    ]
    rows = []
    for fault in (faults.Fault("none"), *faults.FAULTS):
        for kernel in fault.kernels:
            found, lse = [], 0.0
            for one in sets:
                out, sums = faults.output(fault, one, kernel, judged.default_launch(one, kernel))
                found.append(judged.errors(one, out))
                lse = max(lse, judged.lse_error(one, sums))
            everything = worst(found)
            caught = [index for index, m in enumerate(found) if failures(gates[kernel], m)]
            rows.append({
                "fault": fault.name,
                "kernel": kernel,
                **_numbers(everything),
                "lse_error": lse,
                "refused_by": [sets[index].name for index in caught],
                "captures": len(sets),
            })  # fmt: skip
            say(f"{fault.name:48} {kernel:10} refused by {len(caught)} of {len(sets)}")
    return rows


def gates_of(rows: Sequence[Row]) -> tuple[dict[str, Gate], dict[str, ErrorMetrics]]:
    """The gates, and the worst errors that they are made of."""

    def worst_of(*kernels: str) -> ErrorMetrics:
        counted = [row for row in rows if row["kernel"] in kernels and in_rule(row["model"])]
        return worst([ErrorMetrics.from_json(row["errors"]) for row in counted])

    bases = {"sdpa": worst_of("sdpa", "fav2"), "fav2": worst_of("fav2")}
    bases |= {kernel: worst_of(kernel) for kernel in QUANTIZED}
    gates = {kernel: rule.gate_of(base, host=kernel == "sdpa") for kernel, base in bases.items()}
    return gates, bases


def in_rule(model: str) -> bool:
    """Whether a set of captures has a say in the gates."""
    return model in captured.SETS or model.removeprefix("random ") in IN_RULE


def _row(one: Captured, kernel: str, errors: ErrorMetrics) -> Row:
    return {
        "model": one.model, "layer": one.layer, "kernel": kernel, "errors": errors.to_json(),
    }  # fmt: skip


def _numbers(errors: ErrorMetrics) -> Row:
    names = ("worst_head_rel_l1", "centred_rel_l1", "worst_head_cosine")
    return {name: getattr(errors, name) for name in (*names, "worst_head_row_cosine_p10")}


def identity() -> Row:
    """What the numbers depend on."""
    import transformers

    return {
        "toolchain": devices.toolchain().to_json(),
        "transformers": transformers.__version__,
        "device": devices.facts("cpu").to_json(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "weights_sha256": {m: source.sha256 for m, source in weights.SOURCES.items()},
        "text_sha256": inputs.TEXT_SHA256,
        "tokens": inputs.TOKENS,
        "dtype": "bfloat16",
        "block_n": list(BLOCKS),
        "margin": {"kernels": rule.MARGIN, "host": rule.HOST_MARGIN},
    }


def rounded(value: Any) -> Any:  # noqa: ANN401
    """JSON values with floats at seven digits, which is more than a rerun agrees to."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if abs(value - 1) > 0.01 else round(value, 9)
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, derive, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    ask = parser.parse_args()
    torch.set_grad_enabled(False)
    real = [one for model in captured.SETS for one in captured.captured(model)]
    drawn = list(random_sets())
    rows = rounded(capture_rows([*real, *drawn]))
    gates, bases = gates_of(rows)
    report = {
        "identity": identity(),
        "gates": {kernel: gate.to_json() for kernel, gate in gates.items()},
        "worst": {kernel: base.to_json() for kernel, base in bases.items()},
        "captures": rows,
        "faults": fault_rows(gates, [one for one in drawn if one.layer == LONGEST]),
        "options": option_rows([*real, *drawn]),
    }
    ask.output.write_text(json.dumps(rounded(report), indent=1) + "\n", encoding="utf-8")
    for kernel, gate in gates.items():
        print(f"{kernel:10} {gate}")


if __name__ == "__main__":
    main()
