"""Policies searched for SmolLM2 beside single kernels: predicted and real times, and outputs.

The prompt is a batch of long passages of this repository's own pages. One capture of each layer is
recorded while it is read; a policy is searched for each `--max-error`. Real times are whole
prefills, interleaved.

    python benchmarks/policy_llm.py --output policy_llm.json [--models FOLDER] [--tokens 8000]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accuracy import identity, write
from gpu_options import gpu_parser, on_gpu, positive

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from step_timing import sharing_copy  # noqa: E402

import sage_plugin  # noqa: E402
from sage_plugin.errors import TuningError  # noqa: E402
from sage_plugin.measure.timing import TimingLimits, measure  # noqa: E402
from sage_plugin.plugin.policy.rules import Policy  # noqa: E402
from sage_plugin.tune.policy.request import PolicyRequest  # noqa: E402
from sage_plugin.tune.policy.search import search  # noqa: E402
from tests.real import captured, outputs, weights  # noqa: E402

KERNELS = ("fav2", "sage", "fav3_sage", "fav3_fp8")
PAGES = ("docs/*.md", "*.md")

Row = dict[str, Any]


def prompt_of(tokenizer: Any, batch: int, tokens: int) -> torch.Tensor:  # noqa: ANN401
    """(batch, tokens): the pages one after the other, cut into passages."""
    paths = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    ids = tokenizer(text, return_tensors="pt").input_ids[0]
    if len(ids) < batch * tokens:
        raise SystemExit(f"the pages have {len(ids)} tokens, {batch * tokens} are needed")
    return ids[: batch * tokens].view(batch, tokens)


def read(network: Any, prompt: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Logits (batch * tokens, V), fp16 as the model makes them."""
    with torch.no_grad():
        return network(input_ids=prompt, use_cache=False).logits.flatten(0, 1)


def perplexity(logits: torch.Tensor, prompt: torch.Tensor) -> float:
    """Of the prompt by its logits, passage by passage."""
    rows = logits.view(*prompt.shape, -1)
    losses = [
        torch.nn.functional.cross_entropy(row[:-1].float(), ids[1:])
        for row, ids in zip(rows, prompt, strict=True)
    ]
    return float(torch.stack(losses).mean().exp())


def searched(network: Any, prompt: torch.Tensor, args: argparse.Namespace) -> dict[str, Policy]:  # noqa: ANN401
    """A policy for each error budget that something meets, by its name in the table."""
    found: dict[str, Policy] = {}
    with tempfile.TemporaryDirectory() as folder:
        captures = Path(folder) / "captures"
        with sage_plugin.record(network, captures, max_captures=args.captures):
            read(network, prompt)
        for budget in args.max_errors:
            request = PolicyRequest(captures, max_error=budget, runs_dir=Path(folder) / "runs")
            try:
                result = search(request)
            except TuningError as error:
                print(f"max error {budget}: {error}", flush=True)
                continue
            found[f"policy {budget}"] = result.policy
            print(f"max error {budget}: searched in {result.seconds:.1f} s", flush=True)
    return found


def patches(policies: dict[str, Policy]) -> dict[str, dict[str, Any]]:
    """What `patch` is told for each way but the unpatched one."""
    ways: dict[str, dict[str, Any]] = {kernel: {"kernel": kernel} for kernel in KERNELS}
    return ways | {name: {"policy": policy} for name, policy in policies.items()}


def rows_of(network: Any, prompt: torch.Tensor, args: argparse.Namespace) -> list[Row]:  # noqa: ANN401
    """One row a way of reading the prompt."""
    policies = searched(network, prompt, args)
    ways = patches(policies)
    base = read(network, prompt)
    rows: list[Row] = [{"name": "sdpa", "perplexity": perplexity(base, prompt)}]
    for name, options in ways.items():
        with sage_plugin.patched(network, **options) as handle:
            got = read(network, prompt)
        report = handle.report()
        row: Row = {
            "name": name,
            "perplexity": perplexity(got, prompt),
            "rel_l1": outputs.difference(got, base).rel_l1,
            "kernel_calls": report.kernel_calls(),
            "calls": report.total_calls(),
        }
        policy = policies.get(name)
        if policy is not None:
            row["policy"] = policy.to_json()
        rows.append(row)
        del got
    predicted = next((p.prediction for p in policies.values() if p.prediction is not None), None)
    timed = times(network, prompt, ways, args)
    for row in rows:
        row["ms"] = timed[row["name"]]
        own = policies[row["name"]].prediction if row["name"] in policies else predicted
        way = None if own is None else own.of("policy" if row["name"] in policies else row["name"])
        host = None if own is None else own.of("sdpa")
        if way is not None and host is not None:
            row |= {"predicted_error": way.error, "predicted_saved_ms": host.ms - way.ms}
        print(line_of(row, timed["sdpa"]), flush=True)
    return rows


def times(
    network: Any,  # noqa: ANN401
    prompt: torch.Tensor,
    ways: dict[str, dict[str, Any]],
    args: argparse.Namespace,
) -> dict[str, float]:
    """Median milliseconds of a prefill by way; the patched copies share their weights."""

    def call(options: dict[str, Any] | None) -> Callable[[], object]:
        reader = network
        if options is not None:
            reader = sharing_copy(network)
            sage_plugin.patch(reader, **options)

        def run() -> None:
            with torch.no_grad():
                reader.model(input_ids=prompt, use_cache=False)  # without the logits

        return run

    calls = {"sdpa": call(None)} | {name: call(options) for name, options in ways.items()}
    limits = TimingLimits(warmup=2, min_samples=5, max_samples=30, budget_s=args.budget)
    samples = measure(calls, device=args.device, limits=limits)
    return {name: sample.timing().median_ms for name, sample in samples.items()}


def line_of(row: Row, host_ms: float) -> str:
    """A row as text."""
    text = f"{row['name']:14} {row['ms']:8.2f} ms (saved {host_ms - row['ms']:6.2f}"
    if "predicted_saved_ms" in row:
        text += f", predicted {row['predicted_saved_ms']:6.2f}, error {row['predicted_error']:.4f}"
    text += f")  perplexity {row['perplexity']:.4f}"
    if "rel_l1" in row:
        text += f"  L1 {row['rel_l1']:.5f}  {row['kernel_calls']} of {row['calls']} on a kernel"
    return text


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = gpu_parser(__doc__)
    add = parser.add_argument
    add("--models", type=Path, help="folder with the weights")
    add("--tokens", type=int, default=8000, help="tokens of a passage")
    add("--batch", type=int, default=4, help="passages")
    add("--captures", type=int, default=30, help="captures recorded")
    add("--budget", type=positive, default=8.0, help="seconds of timing")
    add("--max-errors", type=float, nargs="+", default=[0.01, 0.03, 0.05], help="budgets")
    return on_gpu(parser, parser.parse_args(argv), "its times are what this is about")


def main(argv: Sequence[str] | None = None) -> int:
    """Search, read, write."""
    args = parsed(argv)
    if args.models is not None:
        os.environ[weights.FOLDER_VARIABLE] = str(args.models)
    network, tokenizer = captured.load("smollm2", device=args.device, dtype=torch.float16)
    prompt = prompt_of(tokenizer, args.batch, args.tokens).to(args.device)
    body = identity(args.device, args.commit)
    facts = {"dtype": "float16", "batch": args.batch, "tokens": args.tokens}
    write(args.output, body | facts | {"rows": rows_of(network, prompt, args)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
