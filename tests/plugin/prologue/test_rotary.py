"""Rotary embeddings where processors find them: imported, of the module, or of their own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytest.importorskip("diffusers")

from sage_plugin.plugin.patch import patch
from sage_plugin.plugin.prologue.unfused import Unfused
from tests.plugin.toys import ToyAttention

pytestmark = pytest.mark.usefixtures("everywhere")

ANGLES = torch.randn(24, 8).repeat_interleave(2, 1)
PAIR = (ANGLES.cos(), ANGLES.sin())
COMPLEX = torch.polar(torch.ones(24, 8), ANGLES[:, ::2])


def apply_rotary_emb(x, freqs, places):
    """A form that nobody knows."""
    return x * freqs[0][places] + x.flip(-1) * freqs[1][places]


def apply_rotary_emb_qwen(x, freqs_cis, use_real=True, use_real_unbind_dim=-1):
    """The parameters of one that is known, and another result."""
    return x * freqs_cis[0] * 0.5


class Imports:
    def __call__(self, attn, query, key, value):
        query, key = attn.norm_q(query), attn.norm_k(key)
        from diffusers.models.embeddings import apply_rotary_emb

        query, key = apply_rotary_emb(query, PAIR), apply_rotary_emb(key, PAIR)
        return F.scaled_dot_product_attention(query, key, value)


class ImportsRelated:
    """Complex numbers, and heads behind tokens until attention."""

    def __call__(self, attn, query, key, value):
        query, key = attn.norm_q(query), attn.norm_k(key)
        from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen

        query, key = (x.transpose(1, 2) for x in (query, key))
        query = apply_rotary_emb_qwen(query, COMPLEX, use_real=False).transpose(1, 2)
        key = apply_rotary_emb_qwen(key, COMPLEX, use_real=False).transpose(1, 2)
        return F.scaled_dot_product_attention(query, key, value)


class OwnDefaults:
    def __call__(self, attn, query, key, value):
        query, key = attn.norm_q(query), attn.norm_k(key)

        def apply_rotary_emb(x, freqs=PAIR):
            return x * freqs[0] + x.flip(-1) * freqs[1]

        query, key = apply_rotary_emb(query), apply_rotary_emb(key)
        return F.scaled_dot_product_attention(query, key, value)


class OwnClosure:
    def __call__(self, attn, query, key, value):
        query, key = attn.norm_q(query), attn.norm_k(key)
        factor = query.shape[-1]

        def apply_rotary_emb(x):
            return x * factor

        query, key = apply_rotary_emb(query), apply_rotary_emb(key)
        return F.scaled_dot_product_attention(query, key, value)


class Unknown:
    def __call__(self, attn, query, key, value):
        query, key = attn.norm_q(query), attn.norm_k(key)
        places = torch.arange(24)
        query, key = (apply_rotary_emb(x, PAIR, places=places) for x in (query, key))
        return F.scaled_dot_product_attention(query, key, value)


class Misleading:
    def __call__(self, attn, query, key, value):
        query, key = attn.norm_q(query), attn.norm_k(key)
        query, key = apply_rotary_emb_qwen(query, PAIR), apply_rotary_emb_qwen(key, PAIR)
        return F.scaled_dot_product_attention(query, key, value)


class Elsewhere:
    """Tables of another dtype than the kernel reads."""

    def __call__(self, attn, query, key, value):
        query, key = attn.norm_q(query), attn.norm_k(key)
        from diffusers.models.embeddings import apply_rotary_emb

        pair = tuple(table.double() for table in PAIR)
        query, key = apply_rotary_emb(query, pair), apply_rotary_emb(key, pair)
        return F.scaled_dot_product_attention(query, key, value)


class Broadcasts:
    """Tables of a batch, which make a batch of one item."""

    def __call__(self, attn, query, key, value):
        query, key = attn.norm_q(query), attn.norm_k(key)
        from diffusers.models.transformers.transformer_ltx2 import apply_interleaved_rotary_emb

        pair = tuple(table.repeat(2, 1, 2) for table in PAIR)
        query, key = (x.transpose(1, 2).flatten(2) for x in (query, key))
        query = apply_interleaved_rotary_emb(query, pair).unflatten(2, (2, 16)).transpose(1, 2)
        key = apply_interleaved_rotary_emb(key, pair).unflatten(2, (2, 16)).transpose(1, 2)
        return F.scaled_dot_product_attention(query, key, value.repeat(2, 1, 1, 1))


WAYS = {
    Broadcasts: (0, {Unfused.OPERATION: 1}),
    Imports: (1, {}),
    ImportsRelated: (1, {}),
    OwnDefaults: (0, {}),
    OwnClosure: (0, {}),
    Unknown: (0, {Unfused.OPERATION: 1}),
    Misleading: (0, {Unfused.DIFFERENT: 1}),
    Elsewhere: (0, {Unfused.OPERATION: 1}),
}


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_embedding_is_found_where_a_processor_has_it(way, normed):
    layer = ToyAttention(way())
    layer.norm_q = layer.norm_k = nn.LayerNorm(16) if normed else nn.Identity()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 24, 16) for _ in range(3))
    with torch.no_grad():
        before = layer(q, k, v)
        handle = patch(layer, kernel="fav2", min_seq=0)
        after = layer(q, k, v)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    [row] = handle.report().rows
    fused, unfused = WAYS[way]
    if normed and way in (OwnDefaults, OwnClosure):
        unfused = {Unfused.OPERATION: 1}
    assert (row.fused, row.unfused) == (fused, unfused)
