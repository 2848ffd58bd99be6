"""The rule that turns measured errors into a gate; `docs/accuracy.md` explains it."""

from __future__ import annotations

import math

from sage_plugin.accuracy.gate import Gate
from sage_plugin.schema import ErrorMetrics

MARGIN = 1.25
"""A limit lies this far over the worst error; the loss of a cosine goes with its square."""
DIGITS = 2
"""A limit, or a limit's distance from 1, is rounded up to this many digits."""


def gate_of(worst: ErrorMetrics, *, centred: bool) -> Gate:
    """The gate for a kernel whose worst errors these are.

    Args:
        worst: worst value of each metric over all inputs.
        centred: limit the centred error, too; not of kernels whose output is rounded before it can
            be looked at in fp32.
    """
    return Gate(
        min_cosine=_under_one(min(worst.cosine, worst.worst_head_cosine)),
        min_row_cosine_p10=_under_one(min(worst.row_cosine_p10, worst.worst_head_row_cosine_p10)),
        max_worst_head_rel_l1=_up(MARGIN * max(worst.rel_l1, worst.worst_head_rel_l1)),
        max_centred_rel_l1=_up(MARGIN * worst.centred_rel_l1) if centred else None,
    )


def _under_one(cosine: float) -> float:
    return 1 - _up(MARGIN**2 * (1 - cosine))


def _up(value: float) -> float:
    """`value` rounded up to two digits.

    Example:
        >>> _up(0.04123), _up(0.04)
        (0.042, 0.04)
    """
    step = math.floor(math.log10(value)) - DIGITS + 1
    return round(math.ceil(round(value / 10**step, 6)) * 10**step, -step)
