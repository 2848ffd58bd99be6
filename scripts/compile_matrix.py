"""Compile every default config for every GPU of the support table, with several Tritons.

    python scripts/compile_matrix.py --triton 3.6.0 --triton 3.9.0 --tritons-dir .venv/tritons

No GPU is needed. Each Triton is installed into a folder of its own, which comes before the packages
of the environment; one process an architecture compiles what the launch code of a call would launch
there (`scripts/aot_builds.py`). What came out of each launch goes into one JSON file: shared
memory, registers a thread, bytes of spills, matrix instructions. Ends with 1 if a launch does not
compile or does not fit into the chip's shared memory.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from sage_plugin import __version__  # noqa: E402
from sage_plugin.device import fp8_dtype  # noqa: E402
from sage_plugin.kernels.support import (  # noqa: E402
    ARCHITECTURES,
    HOPPER_ARCH,
    HOPPER_HEAD_DIMS,
    LOWEST_TRITON,
    NEWEST_TRITON,
    TRITON_KERNELS,
    Architecture,
    release,
)

RESULTS = ROOT / "benchmarks" / "results" / "compile_matrix.json"
DIMS = (40, 64, 96, 128, 256)
MASKED_DIMS = (64, 128)
LINEARS = ("fp8_row", "int8_row")
PAGED = (("fav2", "int8"), ("qk_int8", "int8"), ("fav2", "fp8"), ("qk_fp8", "fp8"))
"""Kernels of paged attention by 8-bit caches."""

GROUPED, GROUPS = ("bf16", "fp8_row", "int8_row"), 8
FEW_ROWS, MANY_ROWS = 16, 4096
BRIEF = ("sm_87", "sm_103", "sm_110", "gfx908", "gfx90a", "gfx1151")
"""Compiled with each default config once: the form of a call differs as on their neighbours."""
CALL = ("arch", "kernel", "variant", "dim", "dtype", "causal", "mask", "form", "rows")
TILE = ("block_m", "block_n", "num_warps", "num_stages", "loads", "maxnreg")
MADE = ("name", "smem_bytes", "registers", "spill_bytes", "products")
OF_FAMILIES = (("linear", "triton"), ("paged", "paged"))
"""Variants of what is no attention, by the word that names its kernel."""

COLUMNS = ("triton", *CALL, *TILE, *MADE)
DEFAULTS = {
    "variant": "portable",
    "dtype": "bfloat16",
    "causal": False,
    "mask": "",
    "form": "",
    "dim": 0,
    "rows": 0,
}
HOPPER_DIMS = tuple(dim for dim in DIMS if HOPPER_HEAD_DIMS[0] <= dim <= HOPPER_HEAD_DIMS[1])


def forms(kernel: str) -> Iterator[dict[str, Any]]:
    """The calls of one kernel: head dims, causal or not, masks, dtypes, features."""
    for dim in DIMS:
        # One plain call of a head dim shows the quantisers too.
        yield {"dim": dim, "attention_only": kernel == "fav2" or dim not in (128, 256)}
        yield {"dim": dim, "causal": True}
    for dim in MASKED_DIMS:
        yield {"dim": dim, "mask": "key_bias"}
        yield {"dim": dim, "mask": "dense"}
    yield {"dim": 128, "causal": True, "mask": "tiles", "form": "all"}
    yield {"dim": 128, "causal": True, "form": "packed"}
    yield {"dim": 128, "dtype": "float16"}
    for dim in (64, 256) if kernel == "fav2" else (128,):
        yield {"dim": dim, "dtype": "float32"}


def hopper_forms() -> Iterator[dict[str, Any]]:
    """The calls of one Hopper variant, which takes no tiles and no other features."""
    for dim in HOPPER_DIMS:
        for causal in (False, True):
            yield {"dim": dim, "causal": causal, "variant": "hopper", "return_lse": causal}
    for dim in MASKED_DIMS:
        yield {"dim": dim, "mask": "key_bias", "variant": "hopper"}
        yield {"dim": dim, "mask": "padding", "causal": True, "variant": "hopper"}
    for dtype in ("float16", "float32"):
        yield {"dim": 128, "dtype": dtype, "variant": "hopper"}


def linears(row: Architecture, name: str) -> Iterator[dict[str, Any]]:
    """The linears of one architecture: few rows and many, what comes before, offsets."""
    for kernel in LINEARS:
        if not row.runs(kernel):
            continue
        call = {"linear": kernel, "arch": name}
        yield call | {"rows": MANY_ROWS}
        if name != row.names[0]:
            continue
        yield call | {"rows": FEW_ROWS, "attention_only": True}
        for prologue in ("gelu_tanh", "layer_norm"):
            yield call | {"rows": MANY_ROWS, "prologue": prologue, "quantizers_only": True}
        if kernel == "int8_row":
            yield call | {"rows": MANY_ROWS, "asymmetric": True}
    for kernel in GROUPED:
        if row.runs("fav2" if kernel == "bf16" else kernel):
            for rows in (MANY_ROWS, FEW_ROWS) if name == row.names[0] else (MANY_ROWS,):
                call = {"linear": kernel, "arch": name, "groups": GROUPS, "attention_only": True}
                yield call | {"rows": rows}


def paged(row: Architecture, name: str) -> Iterator[dict[str, Any]]:
    """Paged attention of one architecture: each kind and cache, a default config at least once."""
    call = {"paged": "fav2", "arch": name}
    yield call | {"dim": 128}
    if name != row.names[0]:
        return
    yield call | {"dim": 128, "form": "prefill"}
    if name in BRIEF:
        return
    yield call | {"dim": 64, "form": "mixed", "page_size": 16}
    for form in ("decode", "prefill"):
        yield call | {"dim": 256, "form": form}
        yield call | {"dim": 128, "form": form, "dtype": "float32", "cache": "float32"}
    for kernel, cache in PAGED:
        if cache != "fp8" or fp8_dtype(name) is not None:
            yield call | {"dim": 128, "paged": kernel, "cache": cache}


def calls(row: Architecture, name: str) -> list[dict[str, Any]]:
    """What is compiled for one architecture; less for those with the instructions of another."""
    wanted = [*linears(row, name), *paged(row, name)]
    for kernel in row.kernels:
        for form in forms(kernel):
            plain = {*form} <= {"dim", "attention_only"}
            brief = form["dim"] in (64, 128, 256) and (
                plain or form.get("mask") == "dense" or "dtype" in form
            )
            if name != row.names[0]:
                chosen = plain and form["dim"] in MASKED_DIMS
            else:
                chosen = brief or name not in BRIEF
            if chosen:
                wanted.append({"kernel": kernel, "arch": name, "attention_only": True} | form)
        if name == HOPPER_ARCH and "hopper" in TRITON_KERNELS[kernel]:
            for form in hopper_forms():
                wanted.append({"kernel": kernel, "arch": name, "attention_only": True} | form)
    return [one | {"with_resources": True, "keep_going": True} for one in wanted]


def installed(version: str, folder: Path) -> Path:
    """A folder with one Triton, installed there if it is not."""
    target = folder / version
    if not (target / "triton").is_dir():
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "install", "--no-deps", "--target", str(target), f"triton=={version}"],
            check=True,
        )
    return target


def environment(target: Path) -> dict[str, str]:
    """The environment of a process that sees one Triton and no GPU."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(target), str(ROOT)]),
        "TRITON_INTERPRET": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_DEFAULT_FP_FUSION": "1",
        "OMP_NUM_THREADS": "1",
    }


def assemblers(env: dict[str, str]) -> dict[str, str]:
    """Release of each assembler that a Triton brings."""
    code = (
        "import glob, json, os, subprocess, triton\n"
        "home = os.path.join(os.path.dirname(triton.__file__), 'backends/nvidia/bin/ptxas*')\n"
        "told = {os.path.basename(p): subprocess.check_output([p, '--version'], text=True)\n"
        "        for p in glob.glob(home)}\n"
        "print(json.dumps({n: t.split('release ')[1].split(',')[0] for n, t in told.items()}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def compiled(wanted: list[dict[str, Any]], env: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Answers of the process that compiles, as they come; its death is an answer too."""
    child = subprocess.Popen(
        [sys.executable, "-m", "scripts.aot_builds", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=env,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps(wanted))
    child.stdin.close()
    for line in child.stdout:
        yield json.loads(line)
    if child.wait():
        yield {"call": wanted[0], "error": f"the compiling process ended with {child.returncode}"}


def flat(version: str, answer: dict[str, Any]) -> list[Any]:
    """One row of the file."""
    call = answer["call"]
    if "linear" in call:
        form = call.get("prologue") or next(
            (word for word in ("asymmetric", "groups") if call.get(word)), ""
        )
        call = call | {"kernel": call["linear"], "variant": "triton", "form": form}
    if "paged" in call:
        form = " ".join((call.get("form", "decode"), call.get("cache", "")))
        call = call | {"kernel": call["paged"], "variant": "paged", "form": form.strip()}
    fields = {**DEFAULTS, **call, **answer["config"], **answer, "triton": version}
    return [fields[name] for name in COLUMNS]


def _variant(call: dict[str, Any]) -> str:
    own = next((kind for name, kind in OF_FAMILIES if name in call), "portable")
    return str(call.get("variant", own))


def run(
    version: str, env: dict[str, str], only: list[str], variant: str | None
) -> tuple[list[Any], list[str]]:
    """Rows and failures of one Triton, of all variants or of one."""
    rows, failures = [], []
    for row in ARCHITECTURES:
        for name in row.names:
            if not row.kernels or release(version) < release(row.triton) or name not in only:
                continue
            count = len(rows)
            wanted = calls(row, name)
            if variant:
                wanted = [one for one in wanted if _variant(one) == variant]
            for answer in compiled(wanted, env):
                where = f"triton {version} {answer['call']}"
                if "error" in answer:
                    failures.append(f"{where}: {answer['error'][-400:]}")
                    continue
                rows.append(flat(version, answer))
                if answer["smem_bytes"] > answer["limit_bytes"]:
                    failures.append(f"{where}: {answer['smem_bytes']} bytes of shared memory")
            worst = max((one[COLUMNS.index("spill_bytes")] for one in rows[count:]), default=0)
            print(f"triton {version} {name}: {len(rows) - count} launches, at most {worst} B spilt")
    return rows, failures


def sources() -> str:
    """Hash of the files that decide what is compiled."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "sage_plugin" / "kernels").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def kept(path: Path, tritons: list[str], archs: list[str], variant: str | None) -> dict[str, Any]:
    """What a file has of other Tritons, architectures and variants than are made anew."""
    found: dict[str, Any] = json.loads(path.read_text())
    if (had := found.get("columns", list(COLUMNS))) != list(COLUMNS):  # of an earlier release
        rows = (dict(zip(had, row, strict=True)) for row in found["rows"])
        found["rows"] = [[(DEFAULTS | row)[name] for name in COLUMNS] for row in rows]
    triton, arch, kind = (COLUMNS.index(name) for name in ("triton", "arch", "variant"))
    found["rows"] = [
        row
        for row in found["rows"]
        if row[triton] not in tritons or row[arch] not in archs or variant not in (None, row[kind])
    ]
    return found


def write(path: Path, results: dict[str, Any], rows: list[Any]) -> None:
    """The file, one row a line."""
    head = json.dumps(results, indent=1)[:-2]
    lines = ",\n".join(f"  {json.dumps(row, separators=(',', ':'))}" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')


def main() -> int:
    """Compile, write, and say what failed."""
    names = [name for row in ARCHITECTURES for name in row.names]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--triton", action="append", help="a version; may be given several times")
    parser.add_argument("--tritons-dir", type=Path, default=ROOT / ".venv" / "tritons")
    parser.add_argument("--arch", action="append", choices=names, help="one of the architectures")
    parser.add_argument(
        "--variant", choices=("portable", "hopper", "triton", "paged"), help="one of the variants"
    )
    parser.add_argument("--keep", action="store_true", help="keep the other rows of the file")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    versions = given.triton or [f"{LOWEST_TRITON}.0", f"{NEWEST_TRITON}.0"]
    rows: list[Any] = []
    failures: list[str] = []
    brought = {}
    for version in versions:
        env = environment(installed(version, given.tritons_dir))
        brought[version] = assemblers(env)
        new_rows, new_failures = run(version, env, given.arch or names, given.variant)
        rows += new_rows
        failures += new_failures
    identity = {
        "sage_plugin": __version__,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "assemblers": brought,
        "kernels_sha256": sources(),
    }
    if given.keep:
        earlier = kept(given.out, versions, given.arch or names, given.variant)
        rows = earlier["rows"] + rows
        failures = earlier["failures"] + failures
        identity = earlier["identity"] | {"renewed": identity}
    write(given.out, {"identity": identity, "failures": failures, "columns": COLUMNS}, rows)
    print(f"{len(rows)} launches, {len(failures)} failures: {given.out}")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
