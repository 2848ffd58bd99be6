"""The accuracy limits of each linear kernel.

They come from every linear of four models with real weights, and from drawn inputs, by the rule of
attention's, 1.25 times the worst error (`docs/accuracy.md`). FP8 e4m3 loses 2.6 % of each operand
whatever its scale; INT8 a step of the row's largest value over sqrt(12), which a few channels that
stick out make several times as large, as in SmolLM2. A gate judges what quantization loses; device
code is judged against its emulation, which is far stricter.
"""

from __future__ import annotations

import functools

from sage_plugin.accuracy.gate import Gate, gate_of

HOST = Gate(min_cosine=0.99998, min_row_cosine_p10=0.99998, max_worst_head_rel_l1=0.006)
_GATES = {
    "bf16": HOST,
    "fp8_row": Gate(0.996, 0.9951, 0.089, max_centred_rel_l1=0.17),
    "fp8_tensor": Gate(0.9953, 0.9942, 0.094, max_centred_rel_l1=0.17),
    "int8_row": Gate(0.988, 0.977, 0.17, max_centred_rel_l1=0.17),
}

gate_for = functools.partial(gate_of, _GATES)
"""Return the gate of a kernel."""
