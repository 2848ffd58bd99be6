"""Which families have norm and rotary embedding of Q and K in one pass, and that it is theirs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

from sage_plugin.plugin.patch import patch, unpatch
from sage_plugin.plugin.prologue import settle
from sage_plugin.plugin.prologue.unfused import Unfused
from tests.plugin import tiny as main_models
from tests.plugin.tiny_families import tiny as other_model

OPERATION, NORM = Unfused.OPERATION, Unfused.NORM
FUSED = {
    "cogx": 2, "wan": 4, "flux": 2, "sd3": 3, "hunyuan_video": 2, "hunyuan_video15": 1,
    "hunyuan_image": 2, "ltx": 2, "ltx2": 6, "qwen": 2, "z_image": 4, "wan_i2v": 3, "wan_vace": 6,
    "skyreels": 4, "chroma": 2, "flux2": 2, "bria": 2, "longcat": 2, "ovis": 2, "auraflow": 2,
    "consisid": 2, "easyanimate": 2, "chronoedit": 4, "framepack": 2, "motif": 3, "cogview3": 2,
    "ace_step": 4, "sana_video": 2, "sana_wm": 2, "hunyuan_dit": 4, "omnigen": 2, "bria_fibo": 2,
    "flux3": 4, "cogview4": 2, "glm_image": 2, "skyreels_causal": 4,
}  # fmt: skip
"""Attention calls of one forward whose norm and embedding are one pass."""
LEFT = {
    "wan_animate": {NORM: 1},  # of the face encoder: a LayerNorm over other channels
    "cosmos": {OPERATION: 4},
    "unet": {},
    "pixart": {},
}
"""Calls that keep the model's own, by reason; a model without either has none to tell."""


def model_of(name):
    return main_models.tiny(name) if name in main_models.CALLS else other_model(name)


def test_the_page_names_them():
    page = Path(__file__).resolve().parents[3] / "docs" / "families.md"
    [line] = [x for x in page.read_text().splitlines() if x.startswith("Fused: ")]
    assert set(line.removeprefix("Fused: ").removesuffix(".").split(", ")) == FUSED.keys()


def report_of(name, **options):
    """Outputs of a forward with the exact kernel, those unpatched, and what was counted."""
    model = model_of(name)
    before = model.run()
    handle = patch(model.module, **{"kernel": "fav2", "min_seq": 0, **options})
    after = model.run()
    rows = handle.report().rows
    unpatch(model.module)
    assert torch.equal(model.run(), before)
    unfused = sum((Counter(row.unfused) for row in rows), Counter())
    return after, before, sum(row.fused for row in rows), unfused


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", FUSED)
def test_norm_and_embedding_are_fused_and_what_they_were(name):
    after, before, fused, unfused = report_of(name)
    assert (fused, unfused) == (FUSED[name], Counter())
    near = 2e-4 if name == "sana_wm" else 2e-6  # as its attention on the kernel alone
    assert (after - before).abs().max() < near * before.abs().max()


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", LEFT)
def test_what_is_not_known_stays_with_its_reason(name):
    after, before, _, unfused = report_of(name)
    assert unfused == LEFT[name]
    assert (after - before).abs().max() < 2e-6 * before.abs().max()


FORMS = {"cogx": 1, "wan": 2, "flux": 2, "qwen": 1, "ltx2": 6}
"""Forms of norm and embedding that a model has."""


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", FORMS)
def test_a_wrong_result_is_never_used(name, monkeypatch):
    """Each form is compared at its first call, and given up for good where it differs."""
    right, forms = settle._joined, []

    def joined(streams):
        forms.append(streams)
        return [x * (1 + 0.1 * (x == x.max())) for x in right(streams)]

    monkeypatch.setattr(settle, "_joined", joined)
    model = model_of(name)
    before = model.run()
    handle = patch(model.module, kernel="fav2", min_seq=0)
    for _ in range(2):
        assert (model.run() - before).abs().max() < 2e-6 * before.abs().max()
    rows = handle.report().rows
    assert sum(row.fused for row in rows) == 0
    assert sum(row.unfused[Unfused.DIFFERENT] for row in rows) == 2 * FUSED[name]
    assert len(forms) == FORMS[name]


def test_without_a_kernel_nothing_is_put_off():
    after, before, fused, unfused = report_of("cogx", kernel="sage")
    assert (fused, unfused) == (0, {Unfused.DEVICE: 2})
    assert not torch.equal(after, before)


REASONS = {
    "exact": ({"kernel": "sdpa"}, Unfused.EXACT),
    "short": ({"min_seq": 4096}, Unfused.SHORT),
}


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", REASONS)
def test_the_bits_of_calls_that_stay_are_the_model_s(name):
    options, reason = REASONS[name]
    after, before, fused, unfused = report_of("flux", **options)
    assert (fused, unfused) == (0, {reason: 2})
    assert torch.equal(after, before)
