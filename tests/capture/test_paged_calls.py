"""Recorded paged attention: real lengths and pages, or pages drawn as they were."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")

import sage_plugin
from sage_plugin.capture.recording.recorder import record
from sage_plugin.capture.store.manifest import MANIFEST
from sage_plugin.capture.store.reader import open_captures
from sage_plugin.errors import CaptureError
from sage_plugin.families import family
from sage_plugin.kernels.contract import HOST, Decision
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.paged_attention.append import append_pages
from tests.cli.program import error_of, sage
from tests.plugin.test_continuous_batching import PROMPTS, eight_bits, generated, model

__all__ = ["model"]  # a fixture

PAGED = family("paged_attention")
OP = "paged_attention"
LENS, ROWS = [40, 20, 4], [1, 0, 4]
"""Keys and rows of three sequences; the first two share a page."""
TABLE = [[9, 3, 7, -1], [9, 1, -1, -1], [5, 0, 0, 0]]


def pages(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Arguments of a call; what nobody reads is NaN where the type has it."""
    torch.manual_seed(3)
    wide = torch.float32 if dtype in (torch.int8, torch.float8_e4m3fn) else dtype
    k, v = (torch.full((12, 16, 2, 8), float("nan"), dtype=wide) for _ in "kv")
    of_keys = torch.arange(2)[:, None] * 4.0 + torch.arange(8) * 0.1
    for page in (9, 3, 7, 1, 5):
        k[page] = (torch.randn(16, 2, 8) + of_keys).to(wide)
        v[page] = (2.0 * torch.randn(16, 2, 8) - of_keys).to(wide)
    call = {"k_cache": k, "v_cache": v}
    if wide != dtype:
        scale = {f"{n}_scale": torch.zeros(12, 2) for n in "kv"}
        small = {n: torch.zeros(12, 16, 2, 8).to(dtype) for n in call}
        for page in (9, 3, 7, 1, 5):
            table, lens, ends = torch.tensor([[page]]), torch.tensor([16]), torch.tensor([0, 16])
            append_pages(k[page], v[page], *small.values(), table, lens, ends, **scale)
        call = small | scale
    return call | {
        "q": torch.randn(sum(ROWS) + 1, 4, 8, dtype=wide),  # and a row behind the last sequence
        "page_table": torch.tensor(TABLE, dtype=torch.int32),
        "kv_lens": torch.tensor(LENS, dtype=torch.int32),
        "cu_q_lens": torch.tensor([0, 1, 1, 5], dtype=torch.int32),
    }


def recorded(model, folder, call, **options):
    """The one capture of a direct call."""
    with record(model, folder, ops=OP, min_seq=0, **options) as recorder:
        out = sage_plugin.paged_attention(**call)
    captures = open_captures(folder, OP)
    (one,) = captures.records
    assert recorder.summary.layers == {one.layer: 1}
    return captures, one, out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_a_call_is_replayed_as_it_was(model, tmp_path, dtype):
    call = pages(dtype) | {"scale": 0.3, "window": (-1, -1)}
    captures, one, out = recorded(model, tmp_path / "c", call)
    shape = one.shape
    assert (list(shape.q_lens), list(shape.kv_lens), shape.max_keys) == (ROWS, LENS, 64)
    assert (one.rows, one.pages, one.holds_pages, one.scale) == (5, 5, True, 0.3)
    assert one.layer.endswith(".paged_attention")
    replay = PAGED.captured(captures, one, "cpu")
    again = replay.whole(Decision("fav2", "emulation"))()
    assert torch.equal(again, out[:5])
    torch.testing.assert_close(
        replay.whole(Decision("sdpa", HOST))(), out[:5], atol=0.02, rtol=0.02
    )
    decision = Decision("fav2", "emulation")
    assert replay.full_size(PAGED.saved_shape(one)).errors(decision, None).rel_l1 < 0.004
    assert replay.flops() == 4 * 4 * 8 * (40 + 1 + 2 + 3 + 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_pages_that_do_not_fit_are_drawn_as_they_were(model, tmp_path, dtype):
    call = pages(dtype)
    captures, one, _ = recorded(
        model, tmp_path / "c", call, max_captures=1, rows=2, max_bytes=18_500
    )
    assert (one.rows, one.holds_pages, one.is_partial) == (2, False, True)
    tensors = captures.tensors(one)
    assert sorted(tensors) == ["k_moments", "page_table", "q", "v_moments"]
    torch.testing.assert_close(tensors["q"], call["q"][[1, 3]])
    read = torch.tensor([9] * 32 + [3] * 16 + [7] * 8 + [1] * 4 + [5] * 4)
    slots = torch.cat([torch.arange(n) for n in (16, 16, 16, 8, 4, 4)])
    drawn = PAGED.captured(captures, one, "cpu").call
    for name in "kv":
        wide = call[f"{name}_cache"][read, slots].float()
        if dtype == torch.int8:
            wide *= call[f"{name}_scale"][read][..., None]
        own = torch.stack((wide.mean(0), wide.std(0, unbiased=False)))
        torch.testing.assert_close(tensors[f"{name}_moments"], own, atol=1e-4, rtol=1e-4)
        cache = getattr(drawn, f"{name}_cache").float()
        if dtype == torch.int8:
            cache *= getattr(drawn, f"{name}_scale")[:, None, :, None]
        got = torch.stack((cache.mean((0, 1)), cache.std((0, 1))))
        torch.testing.assert_close(got, own, atol=0.6, rtol=0.3)
    # rows that were not saved repeat those near them, and shared pages stay shared
    torch.testing.assert_close(drawn.q, call["q"][[1, 1, 1, 3, 3]])
    assert drawn.page_table.tolist() == [[4, 1, 3, -1], [4, 0, -1, -1], [2, -1, -1, -1]]
    assert PAGED.captured(captures, one, "cpu").errors(
        Decision("fav2", "emulation"), None
    ).rel_l1 < 0.004  # fmt: skip


REFUSED = {
    "window": ({"window": (3, 0)}, "a window, a soft cap, sinks, or no causality"),
    "soft cap": ({"softcap": 30.0}, "a window, a soft cap, sinks, or no causality"),
    "sinks": ({"sinks": torch.zeros(4)}, "a window, a soft cap, sinks, or no causality"),
    "all keys": ({"is_causal": False}, "a window, a soft cap, sinks, or no causality"),
    "page": ({"page_table": torch.tensor([[9, -1, 7], [9, 1, 0], [5, 0, 0]])}, "keys in pages"),
    "empty": ({"cu_q_lens": torch.tensor([0, 0, 0, 0])}, "no rows or no keys"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_recorded_is_counted_with_its_reason(model, tmp_path, name):
    changes, reason = REFUSED[name]
    with record(model, tmp_path / "c", ops=OP, min_seq=0) as recorder:
        sage_plugin.paged_attention(**pages() | changes)
    sage_plugin.paged_attention(**pages())  # nobody listens any more
    ((said, count),) = recorder.summary.skipped.items()
    assert said.startswith(reason)
    assert (count, recorder.summary.calls_seen) == (1, 1)


WRONG = {
    "rows": ('"rows":5', '"rows":4', "q is"),
    "pages": ('"pages":5', '"pages":4', "k_cache is"),
    "too many pages": ('"pages":5', '"pages":50', "that no such call reads"),
    "held": ('"holds_pages":true', '"holds_pages":false', "expected q, page_table, k_moments"),
    "lengths": ('"kv_lens":[40', '"kv_lens":[70', "impossible call shape"),
    "sequences": ('"q_lens":[1,0,4]', '"q_lens":[1,4]', "impossible call shape"),
    "type": ('"cache_dtype":"float32"', '"cache_dtype":"bfloat16"', "holds k_cache as F32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_lines_that_files_do_not_bear_out_are_left_out(model, tmp_path, name):
    folder = tmp_path / "c"
    recorded(model, folder, pages())
    right, wrong, words = WRONG[name]
    lines = (folder / MANIFEST).read_text()
    assert right in lines
    (folder / MANIFEST).write_text(lines.replace(right, wrong))
    with pytest.raises(CaptureError, match=words):
        open_captures(folder, OP)


def test_a_folder_is_benched_and_tuned_by_its_lengths(model, tmp_path, monkeypatch):
    """One after another, since lengths of one power of two count as one shape."""
    from sage_plugin.tune.configs import inputs as tuning_inputs

    folder = tmp_path / "c"
    with record(model, folder, ops=OP, min_seq=0, max_captures=2):
        for shift in range(4):
            lens = torch.tensor([40 - shift, 20, 4], dtype=torch.int32)
            sage_plugin.paged_attention(**pages() | {"kv_lens": lens})
            sage_plugin.paged_attention(**pages() | {"kv_lens": torch.tensor([5, 2, 0])})
    counts = json.loads((folder / "counts.json").read_text())["shapes"]
    assert [one["calls"] for one in counts] == [4, 4]
    (group,) = tuning_inputs.from_captures(folder, family=PAGED).groups
    assert group.calls == 8
    assert sorted(sum(one.shape.kv_lens) // 60 for one in group.sources) == [0, 1]
    monkeypatch.chdir(tmp_path)
    words = ("--op", OP, "c", "--kernel", "fav2", "--kernel", "sdpa", "--json", "-", "--force")
    done = sage("bench", *words)
    assert done.exit_code == 0, done.stderr
    tables = json.loads(done.stdout)["tables"]
    assert [row["source"] for table in tables for row in table["rows"]] == ["capture"] * 4
    assert "--tp-size 2 does not change" in error_of(sage("bench", "--op", OP, "c", "--tp-size", 2))
    assert "tuned on a GPU only" in error_of(sage("tune", "--op", OP, "c", "--dry-run"))
    for command in ("bench", "tune"):
        said = error_of(sage(command, "--op", OP, "c", "--max-model-len", "64"))
        assert "--max-model-len draws batches: leave it out, or the captures c" in said


@pytest.mark.parametrize(
    "patched", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["unpatched", "patched"]
)
def test_a_server_is_recorded_layer_by_layer(model, tmp_path, patched):
    """Prompts come packed: what decodes is recorded, of two layers and eleven tokens."""
    handle = sage_plugin.patch(model, kernel="sdpa") if patched else None
    folder, expected = tmp_path / "c", generated(model)
    with (
        record(model, folder, ops=("attention", OP), max_captures=4) as recorder,
        sage_plugin.continuous_batching(model) as batching,
    ):
        assert generated(model) == expected
    assert handle is None or handle.unpatch() is None
    layers = [f"model.model.layers.{i}.self_attn.paged_attention" for i in range(2)]
    calls = {name: n for name, n in recorder.summary.layers.items() if name.endswith(OP)}
    assert calls == dict.fromkeys(layers, batching.decoded // 2)
    captures = open_captures(folder, OP)
    assert len(captures.records) == 4
    for one in captures.records:
        step = max(one.shape.kv_lens) - len(PROMPTS[1])  # of the longest prompt
        lens = sorted((len(prompt) + step for prompt in PROMPTS), reverse=True)
        assert sorted(one.shape.kv_lens, reverse=True)[:3] == lens
        assert (one.shape.tokens, one.rows, one.holds_pages) == (3, 3, True)
        replay = PAGED.captured(captures, one, "cpu")
        assert replay.errors(Decision("fav2", "emulation"), None).rel_l1 < 0.004


def test_packed_prompts_are_no_attention_of_one_sequence(model, tmp_path):
    ops = "attention,paged_attention"
    with record(model, tmp_path / "c", ops=ops, min_seq=0) as recorder:
        with sage_plugin.continuous_batching(model):
            generated(model)
        inside = recorder.summary
        generated(model)  # by transformers' own, whose masks tell what belongs together
    packed = FallbackReason(Fallback.PACKED_BY_HOST, "sage_plugin_flash")
    calls = 2 * 12  # layers and tokens; pages were read in all but the first
    assert inside.skipped[str(packed)] == calls
    records = open_captures(tmp_path / "c", "attention").records
    assert {record.shape.mask_kind for record in records} == {"dense"}
    assert {record.family for record in open_captures(tmp_path / "c").records} == set(
        ops.split(",")
    )


@eight_bits
def test_a_server_with_8_bits_is_recorded_with_its_prompts(model, tmp_path):
    with (
        record(model, tmp_path / "c", ops=OP, min_seq=0, max_captures=30) as recorder,
        sage_plugin.continuous_batching(model, cache="int8") as handle,
    ):
        generated(model)
    captures = open_captures(tmp_path / "c", OP)
    assert recorder.summary.calls_seen == handle.packed + handle.decoded == len(captures.records)
    assert {one.shape.kind for one in captures.records} == {"mixed", "decode"}
    for one in captures.records[:3]:
        assert one.shape.cache_dtype == "int8"
        replay = PAGED.captured(captures, one, "cpu")
        assert replay.errors(Decision("fav2", "emulation"), None).rel_l1 < 0.004
