"""Patching a model of each family of diffusers: what is caught, and that results stay near."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

pytest.importorskip("diffusers")

from sage_plugin.plugin.patch import patch, unpatch
from tests.plugin.tiny_families import FAMILIES, Tiny, tiny
from tests.plugin.toys import processors

MASKED = (
    "ace_step", "allegro", "chroma", "cosmos", "ernie", "hunyuan_image", "hunyuan_video",
    "hunyuan_video15", "krea2", "longcat_audio", "ltx", "ltx2", "lumina", "lumina2", "mochi",
    "motif", "nucleus", "omnigen", "pixart", "prior", "prx", "qwen", "qwen21", "sana",
    "sana_video", "sana_wm", "skyreels_causal",
)  # fmt: skip
"""Families whose outputs depend on the mask that they pass to attention."""


class Host(TorchFunctionMode):
    """Counts the calls of torch's SDPA, and changes their arguments where asked."""

    def __init__(self, *, uniform: bool = False, mask: bool = True) -> None:
        super().__init__()
        self.uniform, self.mask, self.calls = uniform, mask, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False))
        given |= kwargs or {}
        if self.uniform:
            given["query"] = torch.zeros_like(given["query"])
        if not self.mask:
            given["attn_mask"] = None
        return func(**given)


def effect(model: Tiny, **change: bool) -> float:
    """How far an unpatched model's outputs move if its attention is changed."""
    before = model.run()
    with Host(**change):
        return float((model.run() - before).abs().max())


def distance(model: Tiny) -> float:
    """How far a patched model's outputs are from its own unpatched ones."""
    after = model.run()
    assert after.isfinite().all()
    unpatch(model.module)
    before = model.run()
    assert before.abs().max() > 0
    return float((after - before).abs().max())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_call_is_caught_and_the_host_gives_the_same_bits(name):
    family, model = FAMILIES[name], tiny(name)
    keys, objects = list(model.module.state_dict()), processors(model.module)
    kinds = [type(processor) for processor in objects]
    with Host() as host:
        before = model.run()
    assert host.calls == family.calls - family.flex

    handle = patch(model.module, kernel="sdpa", min_seq=0)
    assert torch.equal(model.run(), before)
    report = handle.report()
    assert report.total_calls() == family.calls
    assert all(set(row.calls) <= {"sdpa:host"} and not row.fallbacks for row in report.rows)
    assert len(report.skipped) == family.skipped
    assert all("no attention call" in why for why in report.skipped.values())
    assert list(model.module.state_dict()) == keys

    unpatch(model.module)
    assert all(a is b for a, b in zip(processors(model.module), objects, strict=True))
    assert [type(processor) for processor in objects] == kinds
    assert list(model.module.state_dict()) == keys
    assert torch.equal(model.run(), before)


@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_on_a_kernel_are_near_but_not_equal(name):
    family, model = FAMILIES[name], tiny(name)
    largest, uniform = float(model.run().abs().max()), effect(model, uniform=True)
    handle = patch(model.module, kernel="sage", min_seq=0)
    error = distance(model)
    assert 0.001 * uniform < error < 0.06 * uniform
    assert error < 0.05 * largest

    report, fallbacks = handle.report(), Counter()
    for row in report.rows:
        fallbacks.update(row.fallbacks)
    assert fallbacks == family.fallbacks
    assert report.kernel_calls() == family.calls - fallbacks.total()
    assert {label for row in report.rows for label in row.calls} == {"sage:emulation"}


@pytest.mark.parametrize("name", MASKED)
def test_a_kernel_heeds_the_mask_of_the_text(name):
    model = tiny(name)
    unmasked = effect(model, mask=False)
    patch(model.module, kernel="sage", min_seq=0)
    assert 0 < 4 * distance(model) < unmasked
