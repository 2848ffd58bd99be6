"""The accuracy limits of each linear kernel.

They come from what rounding costs, and a margin for inputs with outliers: FP8 e4m3 loses 2.6 % of
each operand whatever its scale, INT8 a step of the row's largest value over sqrt(12), which a few
channels that stick out make several times as large. A gate judges what quantization loses; device
code is judged against its emulation, which is far stricter.
"""

from __future__ import annotations

from sage_plugin.accuracy.gate import Gate
from sage_plugin.errors import UnknownKernelError
from sage_plugin.schema import LINEAR_KERNELS

HOST = Gate(min_cosine=0.99998, min_row_cosine_p10=0.99998, max_worst_head_rel_l1=0.006)
FP8 = Gate(min_cosine=0.998, min_row_cosine_p10=0.996, max_worst_head_rel_l1=0.06)
INT8 = Gate(min_cosine=0.998, min_row_cosine_p10=0.996, max_worst_head_rel_l1=0.06)
_GATES = {"bf16": HOST, "fp8_row": FP8, "fp8_tensor": FP8, "int8_row": INT8}


def gate_for(kernel: str) -> Gate:
    """Return the gate of a kernel.

    Raises:
        UnknownKernelError: no kernel has this name.

    Example:
        >>> gate_for("fp8_row").max_worst_head_rel_l1
        0.06
    """
    if kernel not in _GATES:
        raise UnknownKernelError(
            f"kernel {kernel!r} is not known; choose one of {', '.join(LINEAR_KERNELS)}"
        )
    return _GATES[kernel]
