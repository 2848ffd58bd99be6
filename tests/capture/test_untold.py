"""Attention of the flash kind that is another than its tensors tell is left out by name."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import sage_plugin
from sage_plugin.capture.recording.recorder import record
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from tests.plugin.test_continuous_batching import model

__all__ = ["model"]  # a fixture
NAME = "toy_varlen"
LAYERS, TOKENS = 2, 12
PACKED = FallbackReason(Fallback.PACKED_BY_HOST, NAME)
WINDOW = FallbackReason(Fallback.WINDOW_BY_HOST, (5, NAME))
ONE = list(range(TOKENS))


@pytest.fixture
def flash(model):
    """A model on attention that makes no mask, as FlashAttention, whatever it then computes."""
    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, lambda **_: None)
    model.set_attn_implementation(NAME)
    yield model
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(NAME)


@pytest.mark.parametrize(
    ("positions", "skipped"),
    [
        ([[*range(5), *range(7)]], PACKED),
        ([[*range(5), *range(5, 12)]], None),
        ([[3 + p for p in range(TOKENS)]], None),
        ([ONE[:6] + ONE[8:] + ONE[:2]], PACKED),
        ([ONE, ONE], None),
        (None, None),
    ],
    ids=["two", "one", "later", "of several cuts", "a batch", "none given"],
)
def test_sequences_that_positions_alone_part_are_left_out(flash, tmp_path, positions, skipped):
    batch = 1 if positions is None else len(positions)
    ids = torch.arange(batch * TOKENS).view(batch, -1)
    given = None if positions is None else torch.tensor(positions)
    with record(flash, tmp_path / "c", min_seq=0) as recorder, torch.no_grad():
        flash(ids, position_ids=given, use_cache=False)
    counts = {} if skipped is None else {str(skipped): LAYERS}
    assert dict(recorder.summary.skipped) == counts
    assert recorder.summary.files == (0 if skipped else LAYERS)


@pytest.mark.parametrize(("window", "skipped"), [(5, WINDOW), (TOKENS, None)])
def test_a_window_that_no_mask_has_is_left_out(flash, tmp_path, window, skipped):
    ids = torch.arange(TOKENS)[None]
    with record(flash, tmp_path / "c", min_seq=0) as recorder, torch.no_grad():
        flash(ids, sliding_window=window, use_cache=False)
    assert dict(recorder.summary.skipped) == ({} if skipped is None else {str(skipped): LAYERS})


def test_positions_are_not_read_where_nobody_listens(flash, monkeypatch):
    def read(*_):
        raise AssertionError("which waits for the device")

    positions = torch.tensor([[*range(5), *range(7)]])
    with sage_plugin.patched(flash, kernel="sage", min_seq=0) as handle, torch.no_grad():
        monkeypatch.setattr(torch.Tensor, "diff", read)
        flash(torch.arange(TOKENS)[None], position_ids=positions, use_cache=False)
    causes = {reason.cause for row in handle.report().rows for reason in row.fallbacks}
    assert causes == {Fallback.IMPLEMENTATION}
