"""What each linear of a model is for, of the families that people run."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("diffusers")

from torch import nn

from sage_plugin.plugin.hosts.diffusers import attention_modules
from sage_plugin.plugin.linears.eligible import find_linears
from tests.plugin import tiny, tiny_families, tiny_transformers

QKVO = "{0}.to_q {0}.to_k {0}.to_v {0}.to_out.0"
ADDED = "{0}.add_q_proj {0}.add_k_proj {0}.add_v_proj {0}.to_add_out"
JOINT = f"{QKVO} {ADDED}"
FF = "{0}.net.0.proj {0}.net.2"
W123 = "{0}.w1 {0}.w2 {0}.w3"
SINGLE = "{0}.attn.to_q {0}.attn.to_k {0}.attn.to_v {0}.proj_mlp {0}.proj_out"


def forms(*texts: tuple[str, str]) -> set[str]:
    """Paths with stars for numbers, made of pairs of a form and where it is."""
    names = {name for form, place in texts for name in form.format(place).split()}
    return {_form(name) for name in names}


def _form(path: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)


T, S = "transformer_blocks.0", "single_transformer_blocks.0"
QUANTIZED = {
    "cogx": forms((QKVO, f"{T}.attn1"), (FF, f"{T}.ff")),
    "wan": forms((QKVO, "blocks.0.attn1"), (QKVO, "blocks.0.attn2"), (FF, "blocks.0.ffn")),
    "flux": forms((JOINT, f"{T}.attn"), (FF, f"{T}.ff"), (FF, f"{T}.ff_context"), (SINGLE, S)),
    "sd3": forms(
        (JOINT, f"{T}.attn"), (QKVO, f"{T}.attn2"), (FF, f"{T}.ff"), (FF, f"{T}.ff_context")
    ),
    "ltx": forms((QKVO, f"{T}.attn1"), (QKVO, f"{T}.attn2"), (FF, f"{T}.ff")),
    "mochi": forms((JOINT, f"{T}.attn1"), (FF, f"{T}.ff"), (FF, f"{T}.ff_context")),
    "qwen": forms((JOINT, f"{T}.attn"), (FF, f"{T}.img_mlp"), (FF, f"{T}.txt_mlp")),
    "hunyuan_video": forms(
        (JOINT, f"{T}.attn"), (FF, f"{T}.ff"), (FF, f"{T}.ff_context"), (SINGLE, S)
    ),
    "z_image": forms(
        *(
            (form, f"{stack}.0.{place}")
            for stack in ("noise_refiner", "context_refiner", "layers")
            for form, place in ((QKVO, "attention"), (W123, "feed_forward"))
        )
    ),
    "wan_vace": forms(
        *(
            (form, f"{stack}.0.{place}")
            for stack in ("blocks", "vace_blocks")
            for form, place in ((QKVO, "attn1"), (QKVO, "attn2"), (FF, "ffn"))
        )
    ),
    "auraflow": forms(
        (JOINT, "joint_transformer_blocks.0.attn"),
        (QKVO, "single_transformer_blocks.0.attn"),
        *(
            (f"{{0}}.{part}.linear_1 {{0}}.{part}.linear_2 {{0}}.{part}.out_projection", place)
            for part, place in (
                ("ff", "joint_transformer_blocks.0"),
                ("ff_context", "joint_transformer_blocks.0"),
                ("ff", "single_transformer_blocks.0"),
            )
        ),
    ),
}  # fmt: skip
ODD = ("cascade", "hidream", "kandinsky5", "krea2", "longcat_audio", "motion", "prx", "sana_wm")
"""Families whose names are their own."""


def _model(name: str) -> nn.Module:
    family = name in tiny_families.FAMILIES
    return (tiny_families.tiny(name) if family else tiny.tiny(name)).module


def _found(model: nn.Module) -> tuple[set[str], set[str]]:
    found = find_linears(model, [path for path, _, _ in attention_modules(model)])
    taken = {_form(path) for path, one in found.items() if one.reason is None}
    return taken, {_form(path) for path in found} - taken


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_linears_that_a_family_runs_on_8_bits(name):
    taken, _ = _found(_model(name))
    assert taken == QUANTIZED[name]


@pytest.mark.parametrize("name", ODD)
def test_no_family_quantizes_what_steers_its_blocks(name):
    model = _model(name)
    taken, left = _found(model)
    assert taken
    steers = re.compile(
        r"norm|embed|modulation|adaLN|time|caption|gate_proj$|motion_modules.*.proj_"
    )
    assert not [
        path for path in taken if steers.search(path) and not path.startswith("blocks.*.gate")
    ]
    outside = {_form(n) for n, m in model.named_children() if isinstance(m, nn.Linear)}
    assert outside <= left


def test_a_language_model_keeps_its_head_and_its_embedding():
    model = tiny_transformers.tiny("llama").module
    taken, left = _found(model)
    block = "model.layers.*"
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert taken == {f"{block}.self_attn.{n}" for n in names} | {
        f"{block}.mlp.{n}" for n in ("gate_proj", "up_proj", "down_proj")
    }
    assert left == {"lm_head"}
