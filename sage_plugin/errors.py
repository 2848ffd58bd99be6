"""Every error that `sage_plugin` raises on purpose, and the exit code that each gives.

A message says what was got, what is allowed and what to do. Nothing here imports anything of ours.
"""

from __future__ import annotations

from collections.abc import Iterable


class SageError(Exception):
    """Base of all errors of this package; the command line prints it as one sentence.

    Attributes:
        exit_code: what `sage` exits with when this error ends a command.
    """

    exit_code: int = 1


class UsageError(SageError, ValueError):
    """A wrong option, an unknown name, or input that is missing, empty or foreign."""

    exit_code = 2


class UnknownKernelError(UsageError):
    """A kernel or variant name that this version does not know."""


class UnsupportedInputError(UsageError):
    """Tensors that a kernel asked for by name cannot take (shape, dtype, device, layout)."""


class PatchError(UsageError, TypeError):
    """An object that holds no attention that can be patched."""


class CaptureError(UsageError):
    """A capture folder or file that is empty, damaged or of another schema."""


class ConfigError(UsageError):
    """A config file, launch config or ledger with unknown, missing or illegal content."""


class TuningError(SageError, RuntimeError):
    """No candidate, the baseline included, passed the accuracy gate."""

    exit_code = 1


class GateError(SageError, RuntimeError):
    """A measured kernel failed its accuracy gate."""

    exit_code = 1


class DeviceError(SageError, RuntimeError):
    """No device, driver or optional package for what was asked."""

    exit_code = 3


class OutputError(SageError, OSError):
    """A file or folder that cannot be written."""

    exit_code = 3


class DemoError(SageError, RuntimeError):
    """The demo model or its packages are missing or damaged."""

    exit_code = 3


def check_name(what: str, name: str, known: Iterable[str], of: str = "") -> None:
    """Raise unless a name is `"auto"` or known.

    Args:
        what: what it names, `"kernel"` or `"backend"`.
        name: the name.
        known: those that there are.
        of: what it belongs to, for the sentence.

    Raises:
        UnknownKernelError: it is not.
    """
    known = tuple(known)
    if name not in ("auto", *known):
        raise UnknownKernelError(
            f"{what} {name!r}{of} is not known; choose one of auto, {', '.join(known)}"
        )


def number_of(number: int, one: str, several: str = "") -> str:
    """Write a number of things, in the singular for one.

    Example:
        >>> number_of(1, "call"), number_of(12_000, "call"), number_of(2, "entry", "entries")
        ('1 call', '12,000 calls', '2 entries')
    """
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def did_you_mean(value: str, allowed: Iterable[str]) -> str:
    """Ask for the allowed value that is nearest to a mistyped one; empty if none is near.

    Example:
        >>> did_you_mean("saeg", ["fav2", "sage"]), did_you_mean("flash", ["fav2", "sage"])
        ("; did you mean 'sage'?", '')
    """
    import difflib

    close = difflib.get_close_matches(value, list(allowed), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
