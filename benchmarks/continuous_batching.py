"""Tokens/s of transformers' continuous batching on a GPU: by its own attention, and by ours.

The model has random weights and the sizes of SmolLM2-135M or Llama 3.2 1B: what a token costs does
not depend on them. All ways have the same prompts, each is run once before, and rounds take turns;
each text is compared with that of the first way, token by token.

    python benchmarks/continuous_batching.py --output cb.json [--model llama-1b] [--requests 64]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from accuracy import identity, write
from gpu_options import gpu_parser

import sage_plugin

SIZES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    },
    "llama-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 997,
    },
}  # fmt: skip
"""Numbers of the models' configurations."""

STOCK = "sdpa"
WAYS: dict[str, dict[str, str] | None] = {
    STOCK: None, "16 bit": {}, "fp8": {"cache": "fp8"}, "int8": {"cache": "int8"},
    "int8, queries too": {"cache": "int8", "kernel": "qk_int8"},
}  # fmt: skip
"""Arguments of `continuous_batching`, `None` for transformers' own."""

Row = dict[str, Any]


def made(size: str, where: str) -> Any:  # noqa: ANN401
    """A model of some size with random weights, in bf16 on a GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], max_position_embeddings=65_536, tie_word_embeddings=True)
    dtype = torch.bfloat16 if where == "cuda" else torch.float32
    model = LlamaForCausalLM._from_config(config, attn_implementation=STOCK, dtype=dtype)
    return model.to(where).eval()


def prompts_of(args: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Prompts of random tokens, of lengths between a quarter of the longest and it."""
    rng = torch.Generator().manual_seed(1)
    low, high = max(1, args.longest // 4), args.longest
    lengths = torch.randint(low, high + 1, (args.requests,), generator=rng).tolist()
    return [torch.randint(3, vocabulary, (n,), generator=rng).tolist() for n in lengths]


def run(model: Any, prompts: list[list[int]], args: argparse.Namespace) -> tuple[Any, float]:  # noqa: ANN401
    """Texts, and seconds."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    greedy = GenerationConfig(
        max_new_tokens=args.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    sizes = {"num_blocks": args.blocks} if args.blocks else {}
    options = ContinuousBatchingConfig(auto_switch_to_flash=False, **sizes)
    begin = time.perf_counter()
    out = model.generate_batch(
        prompts, generation_config=greedy, continuous_batching_config=options, progress_bar=False
    )
    took = time.perf_counter() - begin
    return [out[name].generated_tokens for name in sorted(out)], took


def measured(model: Any, args: argparse.Namespace) -> list[Row]:  # noqa: ANN401
    """Tokens/s of each way, in rounds that take turns, and how much of the stock text it tells."""
    prompts = prompts_of(args, model.config.vocab_size)
    count = args.requests * args.new_tokens
    seconds: dict[str, list[float]] = {way: [] for way in args.ways}
    texts: dict[str, list[list[int]]] = {}
    for turn in range(args.rounds + 1):
        for way in args.ways:
            options = WAYS[way]
            opened = (
                contextlib.nullcontext()
                if options is None
                else sage_plugin.continuous_batching(model, **options)  # type: ignore[arg-type]
            )
            with opened:
                texts[way], took = run(model, prompts, args)
            if turn:  # the first builds kernels and graphs
                seconds[way].append(took)
            print(turn, way, f"{count / took:.0f} tokens/s", flush=True)
    rows: list[Row] = []
    for way, all_of in seconds.items():
        same = sum(
            x == y
            for a, b in zip(texts[args.ways[0]], texts[way], strict=True)
            for x, y in zip(a, b, strict=True)
        )
        rows.append({
            "way": way, "tokens_per_s": count / statistics.median(all_of),
            "seconds": all_of, "equal_tokens": same / count,
            "prompt_tokens": sum(map(len, prompts)), "new_tokens": count,
        })  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write."""
    parser = gpu_parser(__doc__)
    parser.add_argument("--model", choices=SIZES, default="smollm2-135m")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128, help="of each request")
    parser.add_argument("--longest", type=int, default=1024, help="prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, help="pages of the cache (default: by memory)")
    args = parser.parse_args(argv)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    model = made(args.model, where)
    body: Row = identity(where, args.commit)
    body["rows"] = measured(model, args)
    write(args.output, body)


if __name__ == "__main__":
    main()
