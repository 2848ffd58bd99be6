"""Break the package in thirty places, one at a time: the tests named beside each must notice.

    python scripts/mutants.py                # all of them, about ten minutes
    python scripts/mutants.py --list
    python scripts/mutants.py --only 3 --only 17

Nothing here is changed: a mutant is put into a temporary copy. The tests of those that were asked
for run on the copy as it is first, since a test that fails anyway notices nothing. Ends with 1 if a
mutant lives, and with 2 if its text or its tests are not what they were. A mutant that lives is a
claim without a test: write the test, do not drop the mutant.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(
    ".*", "__pycache__", "dist", "build", "node_modules", "tuning_runs", "captured_inputs"
)
TIMEOUT_S = 600
FAILED = 1
"""What pytest ends with where tests failed, and not where it found none or could not begin."""


class Mutant(NamedTuple):
    """One change that must not go unnoticed.

    Attributes:
        name: what is lost, in a few words.
        file: file of the package.
        old: text that stands exactly once in it.
        new: what stands there instead.
        tests: files or node ids, and options of pytest, of which at least one test must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    # -- emulation ------------------------------------------------------------------------------
    Mutant(
        "row sums do not decay when the maximum rises",
        "kernels/attention/backends/emulation/online_softmax.py",
        "norm = norm * decay + summed.sum(-1)",
        "norm = norm + summed.sum(-1)",
        ("tests/kernels/test_emulation.py",),
    ),
    Mutant(
        "a sink takes no weight from the output",
        "kernels/attention/backends/emulation/online_softmax.py",
        "out = out * torch.exp2(lse2 - total)[..., None]",
        "out = out * 1.0",
        ("tests/matrix/test_matrix.py", "-k", "sinks and emulation"),
    ),
    Mutant(
        "a mask hides nothing",
        "kernels/attention/backends/emulation/scores.py",
        "x = x.masked_fill(hidden_by_mask(mask), -math.inf)",
        "x = x + 0.0",
        ("tests/matrix/test_matrix.py", "-k", "emulation and report_32"),
    ),
    Mutant(
        "values owe no rounding error back",
        "kernels/quantize/emulation.py",
        "return QuantizedV(values, scale, mean, mean - gained * scale)",
        "return QuantizedV(values, scale, mean, mean)",
        ("tests/kernels/test_quantisers.py",),
    ),
    # -- kernels in Triton's interpreter --------------------------------------------------------
    Mutant(
        "NaN of a hidden value is lost",
        "kernels/attention/backends/triton/flash_kernel.py",
        'tl.where(bad, float("nan"), 0.0)',
        "tl.where(bad, 0.0, 0.0)",
        ("tests/matrix/test_nan.py", "-k", "nan_shows and fav2"),
    ),
    Mutant(
        "NaN of a hidden value reaches rows that do not see it",
        "kernels/attention/backends/triton/flash_kernel.py",
        "v_tile = tl.where(finite, v_tile, 0.0)",
        "v_tile = tl.where(finite, v_tile, v_tile)",
        ("tests/matrix/test_nan.py", "-k", "nan_shows and fav2"),
    ),
    Mutant(
        "the output loses the mean of V",
        "kernels/attention/backends/triton/quantized_kernel.py",
        "out = acc / norm[:, None] * scale + mean",
        "out = acc / norm[:, None] * scale",
        ("tests/matrix/test_matrix.py", "-k", "interpreter and fav3_sage and report_18"),
    ),
    Mutant(
        "a bias in a kernel is in log2 units",
        "kernels/primitives.py",
        'return tl.where(bias < HIDES, float("-inf"), bias * LOG2E)',
        'return tl.where(bias < HIDES, float("-inf"), bias)',
        ("tests/matrix/test_matrix.py", "-k", "interpreter and report_36"),
    ),
    # -- masks ----------------------------------------------------------------------------------
    Mutant(
        "an expanded mask is not narrowed",
        "kernels/attention/mask.py",
        "if view.shape[dim] > 1 and view.stride(dim) == 0:",
        "if view.shape[dim] > 1 and view.stride(dim) < 0:",
        ("tests/kernels/test_mask.py", "-k", "expanded"),
    ),
    Mutant(
        "the diagonal of a causal call is hidden",
        "kernels/attention/visibility.py",
        "conditions.append(keys > own + right)",
        "conditions.append(keys >= own + right)",
        ("tests/kernels/test_visibility.py",),
    ),
    Mutant(
        "heads that share a mask read past it",
        "kernels/attention/backends/triton/mask_blocks.py",
        "planes=(heads if batch > 1 else 0, 1 if heads > 1 else 0),",
        "planes=(heads if batch > 1 else 0, 0),",
        ("tests/kernels/test_mask_blocks.py", "-k", "how_each_mask"),
    ),
    # -- dispatch and support -------------------------------------------------------------------
    Mutant(
        "one long side is enough for min_seq",
        "kernels/attention/dispatch.py",
        "if shape.seq_q < min_seq or shape.seq_k < min_seq:",
        "if shape.seq_q < min_seq and shape.seq_k < min_seq:",
        ("tests/kernels/test_dispatch.py",),
    ),
    Mutant(
        "auto takes additive masks of rows and keys",
        "kernels/attention/dispatch.py",
        'if additive and shape.mask_kind == "dense":',
        'if additive and shape.mask_kind == "none":',
        ("tests/kernels/test_auto.py", "tests/kernels/test_dispatch.py"),
    ),
    Mutant(
        "an old Triton is let through",
        "kernels/support.py",
        "if row.kernels and release(version) < release(row.triton):",
        "if not row.kernels and release(version) < release(row.triton):",
        ("tests/kernels/test_support.py",),
    ),
    # -- launch configs and the registry --------------------------------------------------------
    Mutant(
        "a config that does not fit a chip is legal",
        "kernels/legality.py",
        "if facts.smem_bytes and smem_bytes > facts.smem_bytes:",
        "if False:",
        ("tests/kernels/test_legality.py",),
    ),
    Mutant(
        "one folder of configs answers for another",
        "kernels/launch_config.py",
        'at = (key, facts.slug, config_dir or "", now.config_dir, *overrides)',
        "at = (key, facts.slug, now.config_dir, *overrides)",
        (
            "tests/kernels/test_launches.py",
            "tests/kernels/test_plan.py",
            "tests/registry/test_lookup.py",
        ),
    ),
    Mutant(
        "the nearest entry is the first one",
        "registry/lookup.py",
        "far = distance.log_distance(entry.key, key)",
        "far = 0.0",
        ("tests/registry/test_lookup.py",),
    ),
    Mutant(
        "synthetic evidence replaces captures",
        "registry/merge.py",
        "if evidence.synthetic and not old.evidence.synthetic:",
        "if evidence.synthetic and old.evidence.synthetic:",
        ("tests/registry/test_merge.py",),
    ),
    # -- plug-in --------------------------------------------------------------------------------
    Mutant(
        "a layer that gave NaN stays on its kernel",
        "plugin/route.py",
        "layer.broken = NOT_FINITE",
        "layer.broken = None",
        ("tests/plugin/test_finite.py",),
    ),
    Mutant(
        "a causal rectangle is aligned as kernels do",
        "plugin/obstacle.py",
        "return CAUSAL if call.is_causal and not _surely(q.shape[seq] == k.shape[seq]) else None",
        "return None",
        ("tests/plugin/test_route.py",),
    ),
    Mutant(
        "unpatch forgets what the layers did",
        "plugin/patch.py",
        "self._past.append(report_of(parts))",
        "self._past.append(report_of([]))",
        ("tests/plugin/test_report.py",),
    ),
    Mutant(
        "a layer that is dropped keeps our processor",
        "plugin/component.py",
        "for layer in former.values():",
        "for layer in ():",
        ("tests/plugin/test_patch.py", "-k", "restores or globs or shared"),
    ),
    # -- capture --------------------------------------------------------------------------------
    Mutant(
        "the best call is evicted, and not the worst",
        "capture/selection/spread.py",
        "worst = max(spare, key=self._kept.__getitem__)",
        "worst = min(spare, key=self._kept.__getitem__)",
        ("tests/capture", "-k", "spread or policy or selection or even"),
    ),
    Mutant(
        "a damaged capture is loaded",
        "capture/store/reader.py",
        "if digest != record.sha256:",
        'if digest == "":',
        ("tests/capture/test_reader.py",),
    ),
    # -- tuning ---------------------------------------------------------------------------------
    Mutant(
        "a race that breaks is not run in pairs",
        "tune/configs/study_search.py",
        "if len(challengers) > 1:",
        "if len(challengers) > 100:",
        ("tests/tune/test_session.py", "tests/tune/test_search.py"),
    ),
    Mutant(
        "a gain under the clock's own noise wins",
        "tune/configs/promote.py",
        'needed = max(min_gain, abs(default.extra.get("aa_ratio", 1.0) - 1))',
        "needed = min_gain",
        ("tests/tune/test_promote.py",),
    ),
    # -- bench ----------------------------------------------------------------------------------
    Mutant(
        "ends of a gain's interval change places",
        "measure/statistics.py",
        "return 1 - math.exp(center), 1 - _exp(high), 1 - _exp(low)",
        "return 1 - math.exp(center), 1 - _exp(low), 1 - _exp(high)",
        ("tests/measure/test_statistics.py",),
    ),
    Mutant(
        "a speedup is a gain",
        "measure/timing.py",
        "center, low, high = (1 / rest if rest > 0 else math.inf for rest in rests)",
        "center, low, high = (2 - rest for rest in rests)",
        ("tests/bench/test_compare.py", "-k", "reference"),
    ),
    # -- policy ---------------------------------------------------------------------------------
    Mutant(
        "a band holds its end",
        "plugin/policy/step_range.py",
        "self.end is None or step < self.end.at(total)",
        "self.end is None or step <= self.end.at(total)",
        ("tests/plugin/test_band.py",),
    ),
    Mutant(
        "a choice may be heavier than its room",
        "tune/policy/knapsack.py",
        "fitting = [one for one in sums[1:] if one[2] <= capacity]",
        "fitting = sums[1:]",
        ("tests/tune/policy/test_knapsack.py",),
    ),
)
"""Thirty places; the file is below `sage_plugin`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants that were asked for and tell which lived."""
    parser = argparse.ArgumentParser(description="Break the package; its tests must notice.")
    parser.add_argument("--list", action="store_true", help="name the mutants and run nothing")
    parser.add_argument(
        "--only", type=int, action="append", metavar="N", help="run this one; may be repeated"
    )
    options = parser.parse_args(arguments)
    if options.list:
        for number, mutant in enumerate(MUTANTS, start=1):
            print(f"{number:3} {mutant.file}: {mutant.name}")
        return 0
    numbers = options.only or range(1, len(MUTANTS) + 1)
    if not all(1 <= number <= len(MUTANTS) for number in numbers):
        parser.error(f"--only takes 1 to {len(MUTANTS)}")
    return _run({number: MUTANTS[number - 1] for number in numbers})


def misplaced(mutants: Iterable[Mutant] = MUTANTS, root: Path = ROOT) -> list[str]:
    """The mutants whose text does not stand exactly once in their file, in a sentence each."""
    found = []
    for mutant in mutants:
        path = root / "sage_plugin" / mutant.file
        count = path.read_text(encoding="utf-8").count(mutant.old) if path.is_file() else 0
        if count != 1:
            found.append(f"{mutant.file} has {mutant.old!r} {count} times ({mutant.name})")
    return found


def _run(chosen: dict[int, Mutant]) -> int:
    if wrong := misplaced(chosen.values()):
        print(*wrong, sep="\n")
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
        lived, broken = [], []
        for number, mutant in chosen.items():
            began = time.monotonic()
            code, text = _tests(copy, mutant)
            if code == 0:
                with _put_in(copy / "sage_plugin" / mutant.file, mutant):
                    code, text = _tests(copy, mutant)
                word = {0: "lived", FAILED: "died"}.get(code, f"pytest ended with {code}")
            else:
                word = "its tests fail without it"
            if word == "lived":
                lived.append(number)
            elif word != "died":
                broken.append(number)
            last = text.strip().splitlines()[-1:] if word != "lived" else []
            took = f"{time.monotonic() - began:.0f} s"
            print(f"{number:3} {word}: {mutant.name} ({took})", *last, sep="; ", flush=True)
    print(f"{len(chosen)} mutants, {len(lived)} lived {lived or ''}")
    return 2 if broken else int(bool(lived))


@contextmanager
def _put_in(path: Path, mutant: Mutant) -> Iterator[None]:
    """The mutant in its file, and the file as it was afterwards."""
    text = path.read_text(encoding="utf-8")
    # Byte code is told from its source by the second of the change and the size alone.
    compiled = Path(importlib.util.cache_from_source(str(path)))
    try:
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        compiled.unlink(missing_ok=True)
        yield
    finally:
        path.write_text(text, encoding="utf-8")
        compiled.unlink(missing_ok=True)


def _tests(copy: Path, mutant: Mutant) -> tuple[int, str]:
    """Exit code and output of the mutant's tests in the copy, which end at the first failure."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-m", "not gpu"]
    try:
        done = subprocess.run(
            [*command, "--tb=no", "-p", "no:cacheprovider", *mutant.tests],
            cwd=copy,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no end within {TIMEOUT_S} s"
    return done.returncode, done.stdout or done.stderr


if __name__ == "__main__":
    raise SystemExit(main())
