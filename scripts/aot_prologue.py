"""Compile the prologue of Q and K for GPUs that are not here.

    TRITON_INTERPRET=0 python -m scripts.aot_prologue sm_90 gfx942

prints one line of JSON for each form on each architecture, with registers and spills on NVIDIA's:
as a pass of its own, and with Q quantized as kernels there do.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass

import torch

from sage_plugin.kernels.attention.prologue import launch
from sage_plugin.kernels.attention.prologue.pair import QkPair
from sage_plugin.kernels.attention.prologue.record import QkNorm, QkStream, Rope
from sage_plugin.kernels.quantize.triton.launch import padded_head_dim
from scripts.aot_builds import Launch, Recorder, compile_launch, facts_of, resources


@dataclass(frozen=True)
class Form:
    """One form of the prologue, at the size of a model.

    Attributes:
        kind: kind of the norms, `""` for none.
        halves: the second half of a head is turned against the first.
        skip: tokens in front that are not turned; below 0 there is no rotary embedding.
    """

    heads: int
    head_dim: int
    kind: str
    across_heads: bool = False
    rounds_first: bool = False
    halves: bool = False
    skip: int = 0

    def streams(self) -> tuple[QkStream, QkStream]:
        """A short Q and K of this form."""
        tokens, width = 256, self.heads * self.head_dim if self.across_heads else self.head_dim
        weight = torch.zeros(width, dtype=torch.bfloat16)
        norm = rope = None
        if self.kind:
            bias = weight if self.kind == "layer" else None
            norm = QkNorm(self.kind, weight, bias, 1e-6, self.across_heads, self.rounds_first)
        if self.skip >= 0:
            table = torch.zeros(tokens - self.skip, self.head_dim)
            rope = Rope(table, table, not self.halves, self.skip)
        shape = (1, tokens, self.heads, self.head_dim)
        q, k = (torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2))
        return QkStream(q, norm, rope), QkStream(k, norm, rope)

    def launches(self, number: torch.dtype | None) -> list[Launch]:
        """What it launches, with Q in 16 bits or quantized."""
        kept: list[Launch] = []
        stock, launch.prologue_kernel = (
            launch.prologue_kernel,
            Recorder(launch.prologue_kernel, kept),
        )
        try:
            q, k = self.streams()
            if number is None:
                launch.joined_pair([q], [k])
            else:
                launch.quantized_pair(QkPair((q,), (k,)), _rows(q, number))
        finally:
            launch.prologue_kernel = stock
        return kept


def _rows(q: QkStream, number: torch.dtype) -> launch.QueryRows:
    batch, tokens, heads, head_dim = q.source.shape
    values = torch.zeros(batch, heads, tokens, padded_head_dim(head_dim), dtype=number)
    largest = 127.0 if number == torch.int8 else torch.finfo(number).max
    return launch.QueryRows(values, torch.zeros(batch, heads, tokens), 0.125, largest)


def numbers_of(arch: str) -> list[torch.dtype | None]:
    """What Q becomes on an architecture."""
    fp8 = facts_of(arch).fp8_dtype
    return [None, torch.int8, *([] if fp8 is None else [getattr(torch, fp8)])]


FORMS = {
    "cogvideox": Form(30, 64, "layer", skip=226),
    "wan": Form(12, 128, "rms", across_heads=True),
    "wan_14b": Form(40, 128, "rms", across_heads=True),
    "flux": Form(24, 128, "rms", rounds_first=True),
    "halves": Form(16, 72, "rms", halves=True),
    "sd3": Form(24, 64, "rms", skip=-1),
    "turned": Form(5, 80, ""),
}


def main(architectures: list[str]) -> None:
    """Compile every form for some architectures; one line each."""
    for arch in architectures:
        for (name, form), number in itertools.product(FORMS.items(), numbers_of(arch)):
            [one] = form.launches(number)
            built = compile_launch(one, arch)
            told = {"arch": arch, "form": name, "q": str(number or torch.bfloat16).split(".")[-1]}
            told["smem_bytes"] = built.metadata.shared
            told["limit_bytes"] = facts_of(arch).smem_bytes
            told |= resources(built.asm["ptx" if arch.startswith("sm_") else "amdgcn"])
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
