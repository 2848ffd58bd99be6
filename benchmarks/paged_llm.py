"""What SmolLM2 loses by the type of its paged cache: perplexity of a long text, and recall.

Numbers are hidden in the text, and asked for behind it. All keys and values go through pages, which
`append_pages` writes; the pages of the text are read again by every question. On a GPU they are
read by `paged_attention`. On a CPU torch's attention reads them gathered and multiplied by their
scales, since the emulation would take hours; `--emulate` has the emulation for short texts, which
also quantizes queries.

Behind the 8,192 positions of its training the model's rotary embedding is scaled (YaRN, by the
length over 8,192). A length at which the 16-bit cache recalls nothing says nothing of the others,
which are left out there.

    python benchmarks/paged_llm.py --output paged_llm.json [--tokens 8192 32768] [--budget 3000]
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data import topics  # type: ignore[import-untyped, unused-ignore]
from typing import Any

import torch
from accuracy import identity, write
from gpu_options import gpu_parser
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import sage_plugin  # noqa: E402
from sage_plugin.kernels.paged_attention.append import append_pages  # noqa: E402
from sage_plugin.kernels.paged_attention.call import PagedCall  # noqa: E402
from sage_plugin.kernels.paged_attention.gathered import gathered  # noqa: E402
from tests.real import models  # noqa: E402

CACHES = {
    "16 bit": (None, "fav2"),
    "fp8": (torch.float8_e4m3fn, "fav2"),
    "int8": (torch.int8, "fav2"),
    "fp8, queries too": (torch.float8_e4m3fn, "qk_fp8"),
    "int8, queries too": (torch.int8, "qk_int8"),
}
"""The caches, by the type that they hold (the model's own if `None`) and the kernel that reads."""

GATHERED = "gathered"
"""In place of a kernel: torch's attention on the keys and values that the pages hold."""

NAME, PAGE = "paged_pages", 64
TRAINED = 8192
"""Positions that the model was trained for."""
ROOM = 20
"""Tokens that the sentence of a number takes at most."""
PART = 1024
"""Tokens whose logits are there at a time."""

CITIES = (
    "Paris", "Rome", "Oslo", "Lima", "Cairo", "Delhi", "Tokyo", "Quito", "Accra", "Dublin",
    "Prague", "Vienna", "Madrid", "Ottawa", "Seoul", "Hanoi", "Lisbon", "Athens", "Warsaw",
    "Budapest", "Helsinki", "Nairobi", "Bogota", "Santiago",
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
        self._wide: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

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
        if self._kernel == GATHERED:
            call = PagedCall(q, pages[0], pages[1], table, lens, ends, **scales)
            return self._gathered(id(module), call, others.get("scaling")), None
        out = sage_plugin.paged_attention(
            q, pages[0], pages[1], table, lens, ends, scale=others.get("scaling"),
            kernel=self._kernel, **scales,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out[None], None

    def _gathered(self, layer: int, call: PagedCall, scale: float | None) -> torch.Tensor:
        """Torch's attention on what the pages hold, `(1, tokens, heads, D)`.

        Full pages are gathered once: what comes behind them does not change them.
        """
        held = self._wide.get(layer)
        begin = 0 if held is None else held[0].shape[1]
        length = int(call.kv_lens)
        rest = call._replace(page_table=call.page_table[:, begin // PAGE :])
        keys = gathered(rest, 0, length - begin)
        k, v = keys.k, keys.v
        if self._cache is not None:
            k, v = k.float() * keys.k_scale[..., None], v.float() * keys.v_scale[..., None]
        k, v = k.to(call.q.dtype), v.to(call.q.dtype)
        if held is None:
            full = length // PAGE * PAGE
            self._wide[layer] = (k[:, :full].clone(), v[:, :full].clone())
        else:
            k, v = torch.cat((held[0], k), 1), torch.cat((held[1], v), 1)
        q, k, v = call.q.transpose(0, 1)[None], k[None], v[None]
        rows, length = q.shape[2], k.shape[2]
        mask = None
        if rows < length:
            mask = torch.ones(rows, length, dtype=torch.bool, device=q.device).tril(length - rows)
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2)

    def _made(self, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
        size = (self._count, PAGE, *k.shape[1:])
        kind = self._cache or k.dtype
        made = [torch.zeros(size, device=k.device).to(kind) for _ in range(2)]
        if self._cache is not None:
            made += [torch.zeros(self._count, k.shape[1], device=k.device) for _ in range(2)]
        return tuple(made)


def hidden_of(network: Any, pages: Pages, ids: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Last hidden states `(N, C)` of tokens behind those that the pages hold."""
    places = torch.arange(pages.seen, pages.seen + ids.shape[1], device=ids.device)[None]
    with torch.no_grad():
        out = network.model(input_ids=ids, position_ids=places, use_cache=False)
    hidden: torch.Tensor = out.last_hidden_state[0]
    return hidden


def logits_of(network: Any, pages: Pages, ids: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Logits `(N, V)` of tokens behind those that the pages hold, fp32."""
    with torch.no_grad():
        logits: torch.Tensor = network.lm_head(hidden_of(network, pages, ids)).float()
    return logits


def perplexity(network: Any, hidden: torch.Tensor, ids: torch.Tensor) -> float:  # noqa: ANN401
    """Of the tokens `(N,)`, from the hidden states before each."""
    total = 0.0
    for at in range(0, len(ids) - 1, PART):
        after = ids[at + 1 : at + PART + 1]
        with torch.no_grad():
            logits = network.lm_head(hidden[at : at + len(after)]).float()
        total += nn.functional.cross_entropy(logits, after, reduction="sum").item()
    return math.exp(total / (len(ids) - 1))


def long_text() -> str:
    """The language reference that comes with Python, by its topics in order."""
    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def scale_rope(network: Any, tokens: int) -> str:  # noqa: ANN401
    """Scale a model's rotary embedding for a length, if that needs it, and say how."""
    config = network.config
    rope = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    if tokens > TRAINED:
        rope |= {
            "rope_type": "yarn", "factor": tokens / TRAINED,
            "original_max_position_embeddings": TRAINED,
        }  # fmt: skip
    config.rope_parameters, config.max_position_embeddings = rope, max(tokens, TRAINED)
    old = network.model.rotary_emb
    network.model.rotary_emb = type(old)(config).to(old.inv_freq.device)
    return f"yarn, factor {tokens / TRAINED:g}" if tokens > TRAINED else "as trained"


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
    """Perplexity and recall for each length and cache, within the budget."""
    rows: list[Row] = []
    started, text = time.perf_counter(), long_text()
    for tokens in args.tokens:
        rope = scale_rope(network, tokens)
        whole = tokenizer(text[: 8 * tokens]).input_ids[: tokens - ROOM * args.needles]
        told, numbers = facts_in(tokenizer.decode(whole), args.needles)
        haystack = tokenizer(told, return_tensors="pt").input_ids[:, :tokens].to(where)
        for name, cache, kernel in _readers(where, args.caches, emulate=args.emulate):
            left = args.budget - (time.perf_counter() - started)
            row: Row = {"tokens": tokens, "rope": rope, "cache": name}
            if rows and _expected(rows, tokens) > left:
                rows.append(row | {"left_out": "no time left"})
                continue
            if name != "16 bit" and _recalls(rows, tokens) is False:
                rows.append(row | {"left_out": "the 16-bit cache recalls nothing at this length"})
                continue
            begin = time.perf_counter()
            row |= _one(network, tokenizer, Pages(cache, kernel, tokens + 256), haystack, numbers)
            rows.append(row | {"seconds": time.perf_counter() - begin})
            print(rows[-1], flush=True)
    return rows


def _readers(
    where: str, names: Sequence[str], *, emulate: bool
) -> Iterator[tuple[str, torch.dtype | None, str]]:
    """Name, type and reader of each cache that is judged here."""
    for name in names:
        cache, kernel = CACHES[name]
        if where == "cuda" or emulate:
            yield name, cache, kernel
        elif kernel == "fav2":
            yield name, cache, GATHERED


def _expected(rows: Sequence[Row], tokens: int) -> float:
    """Seconds of a cache at a length, from the last one that was judged."""
    last = [row for row in rows if "seconds" in row][-1]
    return float(last["seconds"]) * (tokens / last["tokens"]) ** 2


def _recalls(rows: Sequence[Row], tokens: int) -> bool | None:
    """Whether the 16-bit cache recalls anything at a length, `None` where it was not judged."""
    own = [r for r in rows if r["tokens"] == tokens and r["cache"] == "16 bit" and "seconds" in r]
    return bool(own[0]["recalled"]) if own else None


def _one(
    network: Any,  # noqa: ANN401
    tokenizer: Any,  # noqa: ANN401
    pages: Pages,
    haystack: torch.Tensor,
    numbers: dict[str, str],
) -> Row:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, pages.attention)
    AttentionMaskInterface.register(NAME, lambda *args, **others: None)
    network.set_attn_implementation(NAME)
    hidden = hidden_of(network, pages, haystack)
    loss = perplexity(network, hidden, haystack[0])
    pages.seen = haystack.shape[1]
    right, nats = recalled(network, tokenizer, pages, numbers)
    return {
        "read": haystack.shape[1], "perplexity": loss, "recalled": right,
        "needles": len(numbers), "answer_nats": nats,
    }  # fmt: skip


def recalled(
    network: Any,  # noqa: ANN401
    tokenizer: Any,  # noqa: ANN401
    pages: Pages,
    numbers: dict[str, str],
) -> tuple[int, float]:
    """How many numbers are the likeliest answers, and nats per token of the answers."""
    right, nats, where = 0, [], network.device
    for city, number in numbers.items():
        question = f"\n\nWhat is the secret number of {city}? The secret number of {city} is"
        asked = tokenizer(question, return_tensors="pt").input_ids.to(where)
        whole = tokenizer(f"{question} {number}", return_tensors="pt").input_ids.to(where)
        answer = whole[0, asked.shape[1] :]
        logits = logits_of(network, pages, whole[:, :-1])[asked.shape[1] - 1 :]
        right += bool((logits.argmax(-1) == answer).all())
        nats.append(nn.functional.cross_entropy(logits, answer).item())
    return right, sum(nats) / max(1, len(nats))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write."""
    parser = gpu_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[TRAINED], help="lengths of texts")
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--needles", type=int, default=24, help="numbers that are asked for")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds")
    parser.add_argument("--emulate", action="store_true", help="kernels, on a CPU too")
    args = parser.parse_args(argv)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if args.emulate else torch.bfloat16
    network, tokenizer = models.smollm2(device=where, dtype=dtype)
    body: dict[str, Any] = identity(where, args.commit)
    body["text_sha256"] = hashlib.sha256(long_text().encode()).hexdigest()
    body["rows"] = judged(network, tokenizer, where, args)
    write(args.output, body)


if __name__ == "__main__":
    main()
