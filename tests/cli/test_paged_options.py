"""Options of paged attention: batches that they spell out, and what they refuse."""

from __future__ import annotations

import json
import shlex

import pytest

from sage_plugin.cli.options import DrawnInputOptions
from sage_plugin.cli.paged_options import PagedOptions
from sage_plugin.errors import UsageError
from tests.cli.program import error_of, sage

DRAWN = DrawnInputOptions()


def test_lists_are_multiplied_and_kinds_apart() -> None:
    options = PagedOptions(
        page_size=["16,64"], max_model_len=["1000"], num_sequences=["4"], kv_dtype=["bf16,int8"]
    )
    shapes = options.shapes(DRAWN)
    assert len(shapes) == 3 * 2 * 2
    decode, prefill, mixed = (
        next(s for s in shapes if s.kind == k) for k in ("decode", "prefill", "mixed")
    )
    assert (decode.q_lens, decode.kv_lens) == ((1,) * 4, (1000,) * 4)
    assert prefill.q_lens == (1000,)
    assert mixed.q_lens == (1, 1, 1, 1000)
    assert {s.max_keys for s in shapes} == {1008, 1024}  # whole pages
    assert {s.cache_dtype for s in shapes} == {"bfloat16", "int8"}
    assert (decode.heads_q, decode.heads_k, decode.head_dim) == (32, 8, 128)


@pytest.mark.parametrize(("tp", "heads"), [(2, (16, 4)), (8, (4, 1)), (16, (2, 1))])
def test_devices_share_heads(tp: int, heads: tuple[int, int]) -> None:
    options = PagedOptions(max_model_len=["64"], kind=["decode"])
    (shape,) = options.shapes(DRAWN, tp)
    assert (shape.heads_q, shape.heads_k) == heads


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--page-size", "64"], "--page-size belongs to paged attention"),
        (["--op", "paged_attention"], "needs --max-model-len"),
        (
            ["--op", "paged_attention", "--batch-sizes", "4"],
            "--batch-sizes belongs to linears: leave it out",
        ),
        (["--op", "paged_attention", "--num-frames", "4"], "--num-frames belongs to attention"),
        (["--op", "paged_attention", "--max-model-len", "64", "--causal"], "--causal belongs to"),
        (["--op", "paged_attention", "--max-model-len", "64", "folder"], "or the captures folder"),
        (["--op", "paged_attention", "--max-model-len", "64", "--kind", "decodes"], "--kind 'dec"),
        (["--op", "paged_attention", "--max-model-len", "64", "--kv-dtype", "fp4"], "--kv-dtype"),
        (["--op", "paged_attention", "--max-model-len", "64", "--num-q-heads", "9"], "multiple of"),
        (["--op", "paged_attention", "--max-model-len", "64"], "tuned on a GPU only"),
    ],
)
def test_one_sentence_for_what_is_wrong(words: list[str], says: str) -> None:
    done = sage("tune", *words, "--dry-run")
    assert done.exit_code in (2, 3)
    assert says in error_of(done)


def test_heads_that_devices_cannot_share() -> None:
    with pytest.raises(UsageError, match="does not divide 32 query heads"):
        PagedOptions(max_model_len=["64"]).shapes(DRAWN, 3)


def test_a_device_of_two_is_compared_with_half_of_the_heads() -> None:
    words = "--kind decode --max-model-len 32 --num-sequences 2 --num-q-heads 4 --num-kv-heads 2"
    done = sage(
        "bench", "--op", "paged_attention", *words.split(), "-d", 16, "--tp-size", 2, "--kernel",
        "fav2", "--json", "-",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    (table,) = json.loads(done.stdout)["tables"]
    assert (table["shape"]["heads_q"], table["shape"]["heads_k"]) == (2, 1)


def test_explain_says_what_a_batch_gets_and_the_command_that_would_fill_it() -> None:
    words = ("--op", "paged_attention", "--max-model-len", "8192", "--kind", "decode")
    told = sage("configs", "explain", *words, "--as", "nvidia-h200")
    assert told.exit_code == 0, told.stderr
    assert "fav2:triton on NVIDIA H200: decode 35 of" in told.stdout
    assert "(default: default of sm_90)" in told.stdout
    name, *command = shlex.split(told.stdout.rpartition("Next: ")[2])
    filled = sage(*command, "--dry-run")
    assert name == "sage"
    assert "tuned on a GPU only" in error_of(filled), "the command is one that tune takes"
    wrong = sage("configs", "explain", *words, "--seq-len", "64")
    assert "--seq-len belongs to attention" in error_of(wrong)
