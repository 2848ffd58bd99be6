"""The option `linears` of `patch`, checked."""

from __future__ import annotations

from sage_plugin.errors import UnknownKernelError
from sage_plugin.plugin.policy.rules import BASELINE
from sage_plugin.schema import LINEAR_KERNELS

CHOICES = ("auto", *(kernel for kernel in LINEAR_KERNELS if kernel != BASELINE))


def checked_linears(linears: str | None) -> str | None:
    """The kernel that linears are asked to run on, `None` to leave them.

    Raises:
        UnknownKernelError: it quantizes no linear.
    """
    if linears is not None and linears not in CHOICES:
        raise UnknownKernelError(
            f"linears is {linears!r}; choose one of {', '.join(CHOICES)}, or None to leave them"
        )
    return linears
