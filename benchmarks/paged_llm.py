"""What SmolLM2 loses by the type of its paged cache, and how fast continuous batching is.

Perplexity of a text, and recall: numbers are hidden in the text, and asked for behind it. All keys
and values go through pages, written by `append_pages` and read by `paged_attention`; the pages of
the text are read again by every question. On a GPU, tokens/s of `generate_batch` before and after.

    python benchmarks/paged_llm.py --output paged_llm.json [--tokens 2048] [--needles 12]
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peer_kernels
import torch
from accuracy import identity, write
from gpu_options import gpu_parser
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import sage_plugin  # noqa: E402
from sage_plugin.kernels.paged_attention.append import append_pages  # noqa: E402
from tests.real import inputs, models  # noqa: E402

CACHES = {
    "16 bit": (None, "fav2"),
    "fp8": (torch.float8_e4m3fn, "fav2"),
    "fp8, queries too": (torch.float8_e4m3fn, "qk_fp8"),
    "int8": (torch.int8, "fav2"),
    "int8, queries too": (torch.int8, "qk_int8"),
}
"""The caches, by the type that they hold (the model's own if `None`) and the kernel that reads."""

NAME, PAGE = "paged_pages", 64
ROOM = 20
"""Tokens that the sentence of a number takes at most."""

CITIES = (
    "Paris", "Rome", "Oslo", "Lima", "Cairo", "Delhi", "Tokyo", "Quito", "Accra", "Dublin",
    "Prague", "Vienna", "Madrid", "Ottawa", "Seoul", "Hanoi",
)  # fmt: skip

Row = dict[str, Any]


class Pages:
    """The pages of every layer of one sequence, and a model's attention that reads them.

    Attributes:
        seen: tokens that the pages hold already.
    """

    def __init__(self, cache: torch.dtype | None, kernel: str, capacity: int) -> None:
        self.seen, self._cache, self._kernel = 0, cache, kernel
        self._count = -(-capacity // PAGE)
        self._layers: dict[int, tuple[torch.Tensor, ...]] = {}

    def attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **others: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, None]:
        """Stands for an attention function of transformers; one sequence, causal."""
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        pages = self._layers.setdefault(id(module), self._made(k))
        where = k.device
        table = torch.arange(self._count, device=where, dtype=torch.int32)[None]
        lens = torch.tensor([self.seen + len(k)], device=where, dtype=torch.int32)
        ends = torch.tensor([0, len(k)], device=where, dtype=torch.int32)
        scales = {"k_scale": pages[2], "v_scale": pages[3]} if len(pages) > 2 else {}
        append_pages(k, v, pages[0], pages[1], table, lens, ends, **scales)
        out = sage_plugin.paged_attention(
            q, pages[0], pages[1], table, lens, ends, scale=others.get("scaling"),
            kernel=self._kernel, **scales,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out[None], None

    def _made(self, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        size = (self._count, PAGE, *k.shape[1:])
        kind = self._cache or k.dtype
        made = [torch.zeros(size, device=k.device).to(kind) for _ in range(2)]
        if self._cache is not None:
            made += [torch.zeros(self._count, k.shape[1], device=k.device) for _ in range(2)]
        return tuple(made)


def logits_of(network: Any, pages: Pages, ids: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Logits `(N, V)` of tokens behind those that the pages hold, fp32."""
    places = torch.arange(pages.seen, pages.seen + ids.shape[1], device=ids.device)[None]
    with torch.no_grad():
        out = network(input_ids=ids, position_ids=places, use_cache=False)
    return out.logits[0].float()


def facts_in(text: str, count: int, seed: int = 0) -> tuple[str, dict[str, str]]:
    """A text with sentences that name a number for a city, spread evenly, and the numbers.

    Example:
        >>> text, numbers = facts_in("One. Two. Three. Four. ", 2)
        >>> len(numbers), text.count("secret number")
        (2, 2)
    """
    drawn = random.Random(seed)
    numbers = {city: str(drawn.randrange(1000, 9999)) for city in CITIES[:count]}
    parts = text.split(". ")
    for at, (city, number) in enumerate(numbers.items()):
        place = (2 * at + 1) * len(parts) // (2 * count)
        parts[place] = f"The secret number of {city} is {number}. {parts[place]}"
    return ". ".join(parts), numbers


def judged(network: Any, tokenizer: Any, where: str, args: argparse.Namespace) -> list[Row]:  # noqa: ANN401
    """Perplexity and recall for each cache."""
    from transformers import AttentionInterface, AttentionMaskInterface

    ids = inputs.token_ids(tokenizer, args.tokens).to(where)
    told, numbers = facts_in(tokenizer.decode(ids[0, : -ROOM * args.needles]), args.needles)
    haystack = tokenizer(told, return_tensors="pt").input_ids.to(where)
    rows = []
    for name, (cache, kernel) in CACHES.items():
        begin = time.perf_counter()
        pages = Pages(cache, kernel, args.tokens + 256)
        AttentionInterface.register(NAME, pages.attention)
        AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
        network.set_attn_implementation(NAME)
        logits = logits_of(network, pages, ids)
        loss = nn.functional.cross_entropy(logits[:-1], ids[0, 1:])
        right, surprise = recalled(network, tokenizer, pages, haystack, numbers)
        rows.append({
            "cache": name, "perplexity": math.exp(loss.item()), "recalled": right,
            "needles": len(numbers), "answer_nats": surprise,
            "seconds": time.perf_counter() - begin,
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def recalled(
    network: Any,  # noqa: ANN401
    tokenizer: Any,  # noqa: ANN401
    pages: Pages,
    haystack: torch.Tensor,
    numbers: dict[str, str],
) -> tuple[int, float]:
    """How many numbers are the likeliest answers, and nats per token of the answers."""
    pages.seen = 0
    logits_of(network, pages, haystack)
    pages.seen = haystack.shape[1]
    right, nats = 0, []
    for city, number in numbers.items():
        question = f"\n\nWhat is the secret number of {city}? The secret number of {city} is"
        asked = tokenizer(question, return_tensors="pt").input_ids.to(haystack.device)
        whole = tokenizer(f"{question} {number}", return_tensors="pt").input_ids.to(asked.device)
        answer = whole[0, asked.shape[1] :]
        logits = logits_of(network, pages, whole[:, :-1])[asked.shape[1] - 1 :]
        right += bool((logits.argmax(-1) == answer).all())
        nats.append(nn.functional.cross_entropy(logits, answer).item())
    return right, sum(nats) / max(1, len(nats))


def batched(network: Any, tokenizer: Any, args: argparse.Namespace) -> list[Row]:  # noqa: ANN401
    """Tokens/s of continuous batching by transformers' own attention, and by ours."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    ids = tokenizer(inputs.text()).input_ids
    prompts = [ids[at : at + 64 + 16 * at % 900] for at in range(args.requests)]
    greedy = GenerationConfig(
        max_new_tokens=args.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    options = ContinuousBatchingConfig(auto_switch_to_flash=False)

    def run() -> tuple[list[list[int]], float]:
        begin = time.perf_counter()
        out = network.generate_batch(
            prompts, generation_config=greedy, continuous_batching_config=options,
            progress_bar=False,
        )  # fmt: skip
        took = time.perf_counter() - begin
        return [out[name].generated_tokens for name in sorted(out)], took

    network.set_attn_implementation("sdpa")
    made = args.requests * args.new_tokens
    run()
    expected, before = run()
    with sage_plugin.continuous_batching(network) as handle:
        run()
        texts, after = run()
    same = sum(
        a == b for x, y in zip(expected, texts, strict=True) for a, b in zip(x, y, strict=True)
    )
    rows: list[Row] = [
        {"attention": "sdpa", "tokens_per_s": made / before},
        {"attention": repr(handle), "tokens_per_s": made / after, "equal_tokens": same / made},
    ]
    print(*rows, sep="\n", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write."""
    parser = gpu_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="of the text")
    parser.add_argument("--needles", type=int, default=12, help="numbers that are asked for")
    parser.add_argument(
        "--requests", type=int, default=32, help="of continuous batching, 0 for none"
    )
    parser.add_argument("--new-tokens", type=int, default=64, help="of each request")
    args = parser.parse_args(argv)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if where == "cuda" else torch.float32
    network, tokenizer = models.smollm2(device=where, dtype=dtype)
    body: dict[str, Any] = identity(where, peer_kernels.Found((), {}, ()), args.commit)
    body["rows"] = judged(network, tokenizer, where, args)
    if where == "cuda" and args.requests:
        body["batching"] = batched(network, tokenizer, args)
    write(args.output, body)


if __name__ == "__main__":
    main()
