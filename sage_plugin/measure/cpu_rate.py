"""How fast a CPU multiplies matrices: the yardstick of forecasts."""

from __future__ import annotations

import torch

THREAD_FLOPS_PER_S = {"AVX512": 1.2e11, "AVX2": 5e10}
OTHER_THREAD_FLOPS_PER_S = 2e10
"""Speed of fp32 matrix products on a thread, by what torch says of the CPU (measured on a Xeon).

Not measured here and now: the same command on the same machine shall compare the same inputs.
"""


def matmul_flops_per_s() -> float:
    """Return about how fast this CPU multiplies matrices, by its kind and its threads."""
    kind = torch.backends.cpu.get_cpu_capability()
    return torch.get_num_threads() * THREAD_FLOPS_PER_S.get(kind, OTHER_THREAD_FLOPS_PER_S)
