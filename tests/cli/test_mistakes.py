"""What every command answers to a mistake: an exit code and a sentence, before it does a thing."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from sage_plugin.demo.sizes import SIZES
from tests.capture.toys import SCRIPT
from tests.cli.program import sage
from tests.tune.policy import recordings

SHAPE = "-b 1 -hq 2 -sq 48 -d 32"
LINEAR = "--op linear"
ROWS = f"{LINEAR} --out-in-features 96/128 --batch-sizes 32"
SEARCH = "policy search --times times.json --min-seq 16 --step-ranges 2"
LONG, TOO_LONG = "9" * 26, "9" * 400

MISTAKES = [
    # Any command: words that typer does not know.
    ("generate", 2, "No such command 'generate'"),
    ("--nope", 2, "No such option"),
    *((f"{command} --nope", 2, "No such option") for command in ("demo", "bench", "tune")),
    ("demo --digit x", 2, "should be a valid integer"),
    ("bench -b two", 2, "should be a valid integer"),
    ("bench --max-inputs 0", 2, "--max-inputs"),
    ("demo --num-inference-steps 0", 2, "--num-inference-steps"),
    ("demo --digit 10", 2, "--digit"),
    ("policy prove", 2, "Missing argument 'POLICY'"),
    ("policy prove fast --preset all", 2, "No such option"),
    (f"{SEARCH} --max-error 0.03 --space s.json", 2, "No such option"),
    ("capture --nope", 2, "No such option"),
    # Shapes and drawn inputs: the same options, the same sentences.
    *(
        (f"{command} {words}", 2, sentence)
        for command in ("bench", "tune")
        for words, sentence in (
            (f"{SHAPE} -dv 16", "-dv 16 differs from -d 32"),
            (f"{SHAPE} -hk 3", "-hq 2 is not a multiple of -hk 3"),
            (f"{SHAPE} --dtype int4", "--dtype 'int4': allowed are fp16"),
            (
                f"{SHAPE} --layout sbhd",
                "--layout 'sbhd': allowed are bhsd, bshd; did you mean 'bshd'?",
            ),
            (f"{SHAPE} --mask diagonal", "--mask 'diagonal': allowed are"),
            (f"{SHAPE} --inputs-distribution zeros", "--inputs-distribution 'zeros'"),
            (f"{SHAPE} --preset wan-720p", "--preset names whole shapes: leave --seq-len out"),
            (f"{SHAPE} --seed {LONG}", f"--seed {LONG}: must be from 0"),
            (f"{SHAPE} --seed -1", "--seed -1: must be from 0"),
            (f"{SHAPE} -sk {2**31}", "-sk 2147483648: must be at most 2147483647"),
            (f"-sq 64 -sk {TOO_LONG}", "-sk 99999999999999999999...9999 (400 digits): must be at"),
            (f"-sq 64 -hq {TOO_LONG}", "at most 2147483647"),
            (f"-sq 64 -b {TOO_LONG}", "at most 2147483647"),
            (f"-sq {TOO_LONG}", "(400 digits): must be at most 2147483647"),
            (f"-sq {'9' * 5000}", "(5000 digits): must be at most"),
            ("-sq 64 -d 0", "-d 0: must be at least 1"),
            ("-sq many", "whole numbers above 0"),
            ("-sq 0", "whole numbers above 0"),
            ("-sq ²", "whole numbers above 0"),
            ("-b 1 -hq 2", "--batch-size, --num-heads without a length: add --seq-len N"),
            ("--preset wan", "--preset 'wan': allowed are cogvideox-2b"),
            ("--preset wan-720p --causal", "--preset names whole shapes: leave --causal out"),
            ("--preset wan-480p --mask diagonal", "--mask 'diagonal': allowed are"),
            (f"{SHAPE} --device abacus", "--device 'abacus': use cpu, cuda or cuda:1"),
            (f"{SHAPE} --kernel flash9", "kernel 'flash9' is not known; choose one of"),
            (f"{SHAPE} --kernel sage:cuda", "variant 'cuda'"),
        )
    ),
    # Captures are replayed as they are.
    ("bench folder --dtype fp16", 2, "--dtype does not change captures"),
    ("bench folder --mask dense", 2, "--mask does not change captures"),
    ("bench --inputs-distribution drift", 2, "--inputs-distribution does not change captures"),
    ("tune --from-captures --seq-len 64", 2, "--seq-len does not change captures"),
    ("tune --from-captures --preset all", 2, "--preset does not change captures"),
    ("tune --from-captures --mask dense", 2, "--mask does not change captures"),
    (f"tune --from-captures --seed {LONG}", 2, "--seed"),
    (f"bench {SHAPE} --max-inputs 2", 2, "--max-inputs goes with a capture folder"),
    ("bench nowhere", 2, "nowhere does not exist"),
    ("bench foreign", 2, "photo.jpg"),
    ("bench empty", 2, "sage capture"),
    ("tune --from-captures absent", 2, "absent does not exist"),
    ("tune somewhere", 2, "somewhere does not exist: record one with `sage capture`"),
    ("tune one two", 2, "one, two: give one folder of captures"),
    ("bench one two", 2, "one, two: give one folder of captures"),
    ("tune -sq 64 folder", 2, "--seq-len does not change captures"),
    ("configs list --config-dir nope", 2, "--config-dir nope: no such folder"),
    ("configs explain -sq 64 --config-dir nope", 2, "--config-dir nope: no such folder"),
    ("bench --config-dir nope", 2, "--config-dir nope: no such folder"),
    ("configs check captured_inputs/counts.json", 2, "counts.json holds captures, not configs"),
    ("configs check captured_inputs", 2, "captured_inputs holds captures, not configs"),
    ("bench --preset cogvideo-2b", 2, "; did you mean 'cogvideox-2b'?"),
    ("bench --kernel fav3sage", 2, "did you mean 'fav3_sage'?"),
    ("bench --kernel sage:portabel", 2, "variant 'portabel' of kernel 'sage' is not known"),
    ("doctr", 2, "Did you mean 'doctor'?"),
    # sage bench
    (f"bench {SHAPE} --kernel auto", 2, "--kernel auto"),
    (f"bench {SHAPE} --compare-to-ref fa4", 2, "kernel 'fa4' is not known"),
    (f"bench {SHAPE} --metric speed", 2, "--metric 'speed': allowed are time"),
    (f"bench {SHAPE} --method events", 2, "timing method 'events' on cpu"),
    (f"bench {SHAPE} --csv - --json -", 2, "both want stdout"),
    (f"bench {SHAPE} --csv no/x.csv", 3, "no/x.csv: folder"),
    (f"bench {SHAPE} --csv empty", 3, "empty is a folder"),
    (f"bench {SHAPE} --device cuda", 3, "no GPU that torch can use"),
    ("bench --preset all --device cpu --csv out.csv", 2, "on a CPU, where kernels are emulated"),
    # sage tune
    (f"tune {SHAPE} --kernel torch", 2, "name one of fav2, sage, fav3_sage, fav3_fp8"),
    (f"tune {SHAPE} --kernel sage:portable", 2, "'portable' of kernel 'sage' needs a GPU"),
    (f"tune {SHAPE} --budget soon", 2, "--budget 'soon'"),
    (f"tune {SHAPE} --budget 0", 2, "--budget 0.0: must be above 0"),
    (f"tune {SHAPE} --budget {TOO_LONG}", 2, "--budget: more seconds than a number holds"),
    (f"tune {SHAPE} --timeout 1e300", 2, "--timeout 1e+300: must be at most"),
    (f"tune {SHAPE} --max-trials 0", 2, "--max-trials 0: must be above 0"),
    (f"tune {SHAPE} --min-gain 2", 2, "--min-gain 2.0: must be from 0"),
    (f"tune {SHAPE} --space absent.json", 2, "absent.json"),
    (f"tune {SHAPE} --run-name ../up", 2, "--run-name '../up'"),
    (f"tune {SHAPE} --max-error-ratio 0.9", 2, "--max-error-ratio 0.9: must be at least 1"),
    (f"tune {SHAPE} --max-error 0", 2, "--max-error 0.0: must be above 0"),
    (f"tune {SHAPE} --method graph", 2, "timing method 'graph' on cpu"),
    (f"tune {SHAPE} --benchmarking-method amortized", 2, "timing method 'graph' on cpu"),
    (f"bench {SHAPE} --benchmarking-method xprof", 2, "timing method 'profiler' on cpu"),
    ("tune model", 2, "model is a model, not captures: --model model tunes its calls"),
    ("configs apply absent/results.json", 2, "absent/results.json: no such file or folder"),
    (f"tune {SHAPE} --shard 5/4", 2, "--shard 5/4: count from 1/N to N/N"),
    (f"tune {SHAPE} --shard first", 2, "--shard 'first': write it as 1/4"),
    (f"tune {SHAPE} --gpus all", 3, "no GPU that torch can use"),
    (f"tune {SHAPE} --executor slurm", 2, "allowed are local, ray"),
    ("tune --from-captures --device cuda", 3, "no GPU that torch can use"),
    # Linears, of any command that draws inputs
    (f"bench {LINEAR} --batch-sizes 2", 2, "--out-in-features"),
    (f"bench {LINEAR} --out-in-features 12 --batch-sizes 2", 2, "pairs as OUT/IN"),
    (f"bench {LINEAR} --out-in-features a/2 --batch-sizes 2", 2, "--out-in-features 'a'"),
    (f"bench {ROWS} --tp-size 5", 2, "--tp-size 5 does not divide out features 96"),
    (f"bench {ROWS} --tp-split-dim up", 2, "--tp-split-dim 'up'"),
    (f"bench {ROWS} --x-q-dtype fp8 --w-q-dtype int8", 2, "give both the same"),
    (f"bench {ROWS} --x-q-dtype fp4", 2, "--x-q-dtype 'fp4'"),
    (f"bench {ROWS} --seq-len 64", 2, "--seq-len belongs to attention"),
    (f"bench {ROWS} --kernel sage", 2, "kernel 'sage' is not known"),
    (f"bench {ROWS} captured", 2, "draws inputs: leave it out, or the captures"),
    (f"bench {LINEAR}", 2, "holds captures of attention and none of linear: record with"),
    (f"bench {LINEAR} captured", 2, "captured does not exist: record one with `sage capture`"),
    ("bench --op convolution", 2, "--op 'convolution'"),
    ("bench --seq-len 64 --tp-size 2", 2, "add --op linear"),
    (f"tune {ROWS} --kernel int8_row:triton", 3, "linears are tuned on a GPU only"),
    (f"tune {ROWS} --from-captures", 2, "leave it out, or the captures captured_inputs"),
    (f"tune {ROWS} --num-frames 4", 2, "--num-frames belongs to attention"),
    ("tune --batch-sizes 2", 2, "--batch-sizes belongs to linears: add --op linear"),
    # sage capture
    ("capture --size huge", 2, "small, large"),
    ("capture --max-captures 0", 2, "Invalid value for '--max-captures'"),
    ("capture --max-bytes lots", 2, "--max-bytes: got 'lots', expected a size such as \"4GiB\""),
    ("capture --max-bytes 1KB", 2, "--max-bytes: got 1000, expected at least"),
    ("capture --steps x", 2, "--steps: got 'x', expected numbers and ranges"),
    ("capture --heads -3", 2, "--heads: got '-3'"),
    ("capture --batch a", 2, "--batch: got 'a'"),
    ("capture --layers ,", 2, "--layers: got no glob"),
    ("capture --num-steps 0", 2, "Invalid value for '--num-steps'"),
    ("capture --min-seq -1", 2, "Invalid value for '--min-seq'"),
    ("capture -o \udcff theirs.py", 3, "a name that is not UTF-8"),
    ("capture missing.py", 2, "does not exist"),
    ("capture .", 2, "is a folder"),
    ("capture --size small theirs.py", 2, "demo pipeline"),
    ("capture -o theirs.py", 3, "is a file"),
    ("capture -o theirs.py/below", 3, "cannot be written"),
    ("capture -o foreign", 2, "photo.jpg"),
    # sage configs
    ("configs explain", 2, "which call? Give its length"),
    ("configs explain -sq 64 --kernel flash9", 2, "kernel 'flash9' is not known"),
    (
        "configs explain -sq 64 --layout sbhd",
        2,
        "--layout 'sbhd': allowed are bhsd, bshd; did you mean 'bshd'?",
    ),
    ("configs explain -sq 64 --mask diagonal", 2, "--mask 'diagonal': allowed are"),
    ("configs check absent", 2, "absent: no such file or folder"),
    ("configs check c --config-dir c", 2, "give a path or --config-dir, not both"),
    # sage demo
    ("demo --kernel flash", 2, "kernel 'flash' is not known; choose one of auto, torch, sdpa"),
    ("demo --kernel sage:cuda", 2, "variant 'cuda' of kernel 'sage' is not known"),
    ("demo --kernel sage:portable", 2, "'portable' of kernel 'sage' needs a GPU: on a CPU"),
    ("demo --kernel sdpa", 2, "--kernel 'sdpa' has nothing to tune; choose fav2"),
    ("demo --kernel torch", 2, "--kernel 'torch' has nothing to tune"),
    (f"demo --seed {LONG}", 2, f"--seed {LONG}: must be from 0 to"),
    ("demo --size huge", 2, "--size 'huge': allowed are small, large"),
    ("demo --device tpu", 2, "--device 'tpu': use cpu, cuda or cuda:1"),
    ("demo --device cuda", 3, "no GPU that torch can use"),
    ("demo --policy blanced", 2, "fast, balanced, safe; did you mean 'balanced'?"),
    ("demo --policy no.json", 2, "neither a file nor one of fast, balanced, safe"),
    ("demo --policy far.json --out new", 2, "rule 1 of the policy names no layer of this model"),
    ("demo --out foreign", 2, "not the folder of an earlier `sage demo`: name another with --out"),
    ("demo --out .", 2, "not the folder of an earlier `sage demo`"),
    ("demo --out theirs.py", 2, "not the folder of an earlier `sage demo`"),
    ("demo --out theirs.py/below", 3, "cannot be written"),
    # sage policy
    ("policy prove no.json", 2, "neither a file nor one of fast, balanced, safe"),
    ("policy prove wan.json", 2, "examples/cogvideo/compare.py --model ID --policy wan.json"),
    ("policy prove far.json", 2, "rule 1 of the policy names no layer"),
    ("policy prove fast --size huge", 2, "--size 'huge': allowed are small, large"),
    ("policy prove fast --seed -1", 2, "--seed -1: must be from 0"),
    ("policy prove fast --kernel flash", 2, "kernel 'flash' is not known"),
    ("policy prove fast --kernel auto", 2, "--kernel auto: name the kernels"),
    ("policy prove fast --device cuda", 3, "no GPU that torch can use"),
    ("policy prove safe --out foreign", 2, "not the folder of an earlier `sage policy prove`"),
    ("policy sensitivity", 2, "got none, and sensitivity is measured with one kernel"),
    ("policy sensitivity --kernel sage --kernel fav2", 2, "got sage, fav2, and sensitivity is"),
    ("policy sensitivity --kernel sage --step-ranges 0", 2, "--step-ranges 0: use 1 to 100 ranges"),
    ("policy sensitivity -o times.json --kernel sage", 2, "is not a file of sensitivities"),
    (SEARCH, 2, "give one of --max-error and --max-ms"),
    (f"{SEARCH} --max-error 0.03 --max-ms 9", 2, "give one of --max-error and --max-ms"),
    (f"{SEARCH} --max-error nan", 2, "--max-error nan: must be above 0"),
    (f"{SEARCH} --max-error 1e-7", 1, "nothing that saves time has so little error"),
    (f"{SEARCH} --max-ms 1", 1, "the fastest choice takes"),
    (f"{SEARCH} --max-error 0.03 --kernel flash9", 2, "kernel 'flash9' is not known"),
    (f"{SEARCH} --max-error 0.03 --kernel sage+hadamart=4", 2, "no field 'hadamart'"),
    (f"{SEARCH} --max-error 0.03 --sensitivity absent.json", 2, "absent.json"),
    (f"{SEARCH} --max-error 0.03 -o times.json", 2, "exists and is not a policy"),
    (f"{SEARCH} --max-error 0.03 -o no/p.json", 2, "does not exist"),
    (f"{SEARCH} --max-error 0.03 -o .", 2, "is not a policy"),
    (f"{SEARCH} --max-error 0.03 --step-ranges 0", 2, "--step-ranges 0: use 1 to 100 ranges"),
    (f"{SEARCH} --max-error 0.03 --device cuda", 3, "no GPU"),
    ("policy search --max-error 0.03", 2, "on a CPU kernels are emulated"),
    ("policy search absent --max-error 0.03 --times times.json", 2, "absent does not exist"),
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """A folder with captures, times, policies of other models, and what is somebody else's."""
    folder = tmp_path_factory.mktemp("theirs")
    recordings.write(folder / "captured_inputs")
    recordings.times(folder / "times.json")
    (folder / "theirs.py").write_text(SCRIPT.format(patch="", end=""))
    for name in ("empty", "foreign", "model"):
        (folder / name).mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "foreign" / "photo.jpg").write_text("years of work")
    far = {"rules": [{"kernel": "sage", "layers": ["*blocks.29.*"]}]}
    wan = {"rules": [{"kernel": "sage"}], "model": "WanTransformer3DModel"}
    for name, policy in (("far", far), ("wan", wan)):
        (folder / f"{name}.json").write_text(json.dumps({"schema_version": 1, **policy}))
    return folder


@pytest.fixture
def _copied(theirs, monkeypatch):
    shutil.copytree(theirs, Path(), dirs_exist_ok=True)
    monkeypatch.setitem(SIZES, "small", dataclasses.replace(SIZES["small"], frames=4))


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


@pytest.mark.usefixtures("_copied")
@pytest.mark.parametrize(
    ("line", "code", "sentence"), MISTAKES, ids=[line[:60] for line, _, _ in MISTAKES]
)
def test_a_mistake_is_one_sentence_and_touches_nothing(line, code, sentence):
    before = contents()
    result = sage(line)
    said = " ".join(result.stderr.replace("│", " ").split())
    assert (result.exit_code, sentence in said) == (code, True), result.output
    assert said.count("error: ") == (said.find("Usage:") < 0)
    assert not [line for line in result.stdout.splitlines() if not line.startswith("1. Load")]
    after = contents()
    measured = [name for name in after if name.startswith(("tuning_runs", "new"))]
    assert {name: data for name, data in after.items() if name not in measured} == before
