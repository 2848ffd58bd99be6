"""What a linear is for in its model, by its path: which roles bear 8 bits, and which stay.

Everybody keeps embedders, modulation and the first and last projections in 16 bit; about the rest
the lists of others contradict each other, and `sage policy search` measures it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum
from fnmatch import fnmatchcase

from torch import nn

from sage_plugin.plugin.context import layer_path

BASE_LAYER = "base_layer"
"""Where an adapter of PEFT keeps the layer that it is put around."""


class Role(Enum):
    """What a linear is for; the value is how a report calls all of one role."""

    ATTENTION_IN = "attention inputs"
    ATTENTION_OUT = "attention outputs"
    FEED_FORWARD_IN = "feed-forward inputs"
    FEED_FORWARD_OUT = "feed-forward outputs"
    EMBEDDER = "embedders"
    MODULATION = "modulation and linears of norms"
    GATE = "gates and routers"
    PROJECTION = "projections into and out of the blocks"
    EXPERTS = "experts"
    OTHER = "linears of no known role"

    @property
    def quantized(self) -> bool:
        """Whether linears of this role are taken."""
        return self in _QUANTIZED


_QUANTIZED = (
    Role.ATTENTION_IN, Role.ATTENTION_OUT, Role.FEED_FORWARD_IN, Role.FEED_FORWARD_OUT
)  # fmt: skip

_BY_WORD = (
    (Role.MODULATION, r"norm|(^|_)mod(_|$)|modulation|adaln|scale_shift|time_emb_proj"),
    (Role.EMBEDDER, r"embed|(^|_)emb(_|$)|time|caption|pooler"),
    (Role.GATE, r"router|(^|_)gate_logits$|^to_gate$|^output_gate$|^beta_proj$"),
)
"""Words of any part of a path, the first that fits."""
_FEED_FORWARD = re.compile(
    r"^ff|_ff$|ffn|mlp|feed_forward|expert|^fc\d|channelwise|^(gate|up|down)_proj$|^intermediate$"
    r"|^output$"
)
_OUTPUT = re.compile(r"(^|_)out(_|\d|$)|out_layer|out_proj|^o_proj$|^w?o$|attn_proj$|^proj$")
_DOWN = re.compile(r"(^|_)out(_|$)|out_proj|^down|^w2$|fc2$|^wo$|^output|^linear_2$")

FAMILIES: dict[str, tuple[tuple[str, Role], ...]] = {
    "AuraFlowTransformer2DModel": (("*.ff*.linear_2", Role.FEED_FORWARD_IN),),
    "SanaWMTransformer3DModel": (("*.attn.gate_proj", Role.GATE),),
    "UNetMotionModel": (("*motion_modules.*.proj_*", Role.PROJECTION),),
    "WanVACETransformer3DModel": (("vace_blocks.*.proj_*", Role.PROJECTION),),
}
"""What the words do not tell, by class of the model: globs of paths, and the role of each."""


def role_of(path: str, *, model: str, blocks: Iterable[str], attention: Iterable[str]) -> Role:
    """The role of a linear.

    Args:
        path: its path inside the model.
        model: class of the model.
        blocks: paths of the model's blocks (`blocks_of`).
        attention: paths of its attention modules.

    Example:
        >>> where = {"model": "X", "blocks": ["blocks.0"], "attention": ["blocks.0.attn"]}
        >>> role_of("blocks.0.attn.to_q", **where), role_of("proj_out", **where)
        (<Role.ATTENTION_IN: 'attention inputs'>, <Role.PROJECTION: 'projections ...>)
    """
    path = plain_path(path)
    for glob, role in FAMILIES.get(model, ()):
        if fnmatchcase(path, glob):
            return role
    words = [part.lower() for part in path.split(".") if not part.isdigit()]
    for role, pattern in _BY_WORD:
        if any(re.search(pattern, word) for word in words):
            return role
    block = max((b for b in blocks if path.startswith(f"{b}.")), key=len, default=None)
    if block is None:
        return Role.PROJECTION
    if any(path.startswith(f"{plain_path(one)}.") for one in attention):
        return Role.ATTENTION_OUT if _OUTPUT.search(words[-1]) else Role.ATTENTION_IN
    return _beside_attention(path.removeprefix(f"{block}.").lower().split("."))


def _beside_attention(parts: list[str]) -> Role:
    """The role of a linear in a block, outside its attention; `parts` is its path in the block."""
    if parts[0] in ("proj_in", "proj_out"):
        return Role.FEED_FORWARD_OUT if parts[0] == "proj_out" else Role.PROJECTION
    words = [part for part in parts if not part.isdigit()]
    if not any(_FEED_FORWARD.search(word) for word in words):
        return Role.OTHER
    last = parts[-1]
    if words[-2:] == ["output", "dense"]:  # as in BERT
        return Role.ATTENTION_OUT if "attention" in words else Role.FEED_FORWARD_OUT
    if last.isdigit():  # of a sequence: the first goes up, a later one down
        return Role.FEED_FORWARD_IN if last == "0" else Role.FEED_FORWARD_OUT
    return Role.FEED_FORWARD_OUT if _DOWN.search(last) else Role.FEED_FORWARD_IN


def blocks_of(model: nn.Module, attention: Iterable[str]) -> list[str]:
    """Paths of a model's blocks: elements of those lists of modules that hold attention."""
    holding = {path[:end] for path in attention for end, c in enumerate(path) if c == "."}
    return [
        f"{layer_path(path)}.{number}"
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and layer_path(path) in holding
        for number in range(len(module))
    ]


def plain_path(path: str) -> str:
    """A path without what compilers and adapters put around modules.

    Example:
        >>> plain_path("blocks.0._orig_mod.attn.to_q.base_layer")
        'blocks.0.attn.to_q'
    """
    return ".".join(part for part in layer_path(path).split(".") if part != BASE_LAYER)
