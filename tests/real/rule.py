"""The rule that turns measured errors into a gate; `docs/accuracy.md` explains it."""

from __future__ import annotations

import math

from sage_plugin.accuracy.gate import Gate
from sage_plugin.schema import ErrorMetrics

MARGIN = 1.25
"""A limit lies this far over the worst error; the loss of a cosine goes with its square."""
HOST_MARGIN = 2.5
"""Of the host's attention, which is not ours and differs from device to device."""
DIGITS = 2
"""A limit, or a limit's distance from 1, is rounded up to this many digits."""


def gate_of(worst: ErrorMetrics, *, host: bool = False) -> Gate:
    """The gate for a kernel whose worst errors these are.

    Args:
        worst: worst value of each metric over all inputs.
        host: whether it is the host's attention. Its output is rounded before anyone can look at it
            in fp32, so that its centred error means nothing and has no limit.
    """
    margin = HOST_MARGIN if host else MARGIN

    def under_one(cosine: float) -> float:
        return round(1 - _up(margin**2 * (1 - cosine)), 9)

    return Gate(
        min_cosine=under_one(min(worst.cosine, worst.worst_head_cosine)),
        min_row_cosine_p10=under_one(min(worst.row_cosine_p10, worst.worst_head_row_cosine_p10)),
        max_worst_head_rel_l1=_up(margin * max(worst.rel_l1, worst.worst_head_rel_l1)),
        max_centred_rel_l1=None if host else _up(margin * worst.centred_rel_l1),
    )


def _up(value: float) -> float:
    """`value` rounded up to two digits.

    Example:
        >>> _up(0.04123), _up(0.04)
        (0.042, 0.04)
    """
    step = math.floor(math.log10(value)) - DIGITS + 1
    return round(math.ceil(round(value / 10**step, 6)) * 10**step, -step)
