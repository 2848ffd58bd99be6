"""Telling a kernel that could not be built from one that failed while it ran."""

from __future__ import annotations

from sage_plugin.kernels.fallback import Fallback, FallbackReason

COMPILER_MODULES = ("triton.",)
COMPILER_SIGNS = ("PassManager::run failed", "ptxas", "out of resource", "C compiler")


def by_compiler(kind: str, message: str) -> bool:
    """Whether an exception came from building a kernel.

    Args:
        kind: module and name of its class, such as `triton.runtime.errors.OutOfResources`.
        message: its text.

    Example:
        >>> by_compiler("builtins.RuntimeError", "PassManager::run failed")
        True
    """
    return kind.startswith(COMPILER_MODULES) or any(sign in message for sign in COMPILER_SIGNS)


def build_failure(error: BaseException) -> FallbackReason | None:
    """Why a kernel could not be built; `None` for any other error.

    A device that has run into an error cannot be trusted with another call, so what fails while it
    runs is not among these.

    Example:
        >>> print(build_failure(RuntimeError("Failed to find C compiler")))
        the kernel cannot be built here (RuntimeError: Failed to find C compiler)
        >>> build_failure(RuntimeError("CUDA error: an illegal memory access")) is None
        True
    """
    kind = f"{type(error).__module__}.{type(error).__name__}"
    if not (by_compiler(kind, str(error)) or isinstance(error, ImportError)):
        return None
    text = " ".join(str(error).split())[:200]
    return FallbackReason(Fallback.BUILD_FAILED, (type(error).__name__, text))
