"""The accuracy limits of each attention kernel.

They come from real tensors: the worst errors of each kernel's emulation on every attention layer of
SmolLM2, MiniLM and Whisper and on calls of the demo model, and a margin. `benchmarks/set_gates.py`
measures and derives them, `docs/accuracy.md` explains the rule and shows what they refuse. A gate
judges what quantization loses; whether the device code computes what it should is judged against
the kernel's own emulation, which is far stricter.
"""

from __future__ import annotations

from sage_plugin.accuracy.gate import Gate
from sage_plugin.kernels.attention.dispatch import resolve_kernel

HOST = Gate(
    min_cosine=0.999983,
    min_row_cosine_p10=0.999978,
    max_worst_head_rel_l1=0.0057,
)
FAV2 = Gate(
    min_cosine=0.9999979,
    min_row_cosine_p10=0.9999972,
    max_worst_head_rel_l1=0.0021,
    max_centred_rel_l1=0.0037,
)
SAGE = Gate(
    min_cosine=0.9979,
    min_row_cosine_p10=0.9933,
    max_worst_head_rel_l1=0.052,
    max_centred_rel_l1=0.034,
)
FAV3_SAGE = Gate(
    min_cosine=0.9915,
    min_row_cosine_p10=0.985,
    max_worst_head_rel_l1=0.098,
    max_centred_rel_l1=0.11,
)
FAV3_FP8 = Gate(
    min_cosine=0.953,
    min_row_cosine_p10=0.83,
    max_worst_head_rel_l1=0.25,
    max_centred_rel_l1=0.13,
)

_GATES = {
    "torch": HOST,
    "sdpa": HOST,
    "fav2": FAV2,
    "sage": SAGE,
    "fav3_sage": FAV3_SAGE,
    "fav3_fp8": FAV3_FP8,
}


def gate_for(kernel: str) -> Gate:
    """Return the gate of a kernel, by its name or an alias of it.

    Raises:
        UnknownKernelError: no kernel has this name.

    Example:
        >>> gate_for("qk_int8").max_worst_head_rel_l1
        0.052
    """
    return _GATES[resolve_kernel(kernel)]
