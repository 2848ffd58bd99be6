"""Names of capture files, and the checks that those of a manifest do no harm."""

from __future__ import annotations

import re
import stat
from pathlib import Path

SUFFIX = ".safetensors"
NUMBERED = re.compile(r"\.?\d{6,}\.safetensors(\..*)?")
"""Names that a writer gives: a capture, or the temporary file of one."""

WEIGHT = re.compile(r"\.?w-[0-9a-f]{16}\.safetensors(\..*)?")
"""The same of the weight of captures."""

MOST_CHARACTERS = 300
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def is_plain_name(name: str) -> bool:
    """Whether a manifest may name this file: no folder, no hidden file, a capture's suffix.

    Example:
        >>> is_plain_name("000003.safetensors"), is_plain_name("../secret.safetensors")
        (True, False)
    """
    return _PLAIN.fullmatch(name) is not None and name.endswith(SUFFIX)


def weight_name(sha256: str) -> str:
    """Return the name of a weight's file, the same for equal weights.

    Example:
        >>> weight_name("0123456789abcdef" * 4)
        'w-0123456789abcdef.safetensors'
    """
    return f"w-{sha256[:16]}{SUFFIX}"


def file_problem(folder: Path, name: str) -> str | None:
    """Why a named capture file must not be opened, or `None`."""
    if not is_plain_name(name):
        return f"{name!r} is not a plain file name of a capture"
    path = folder / name
    try:
        if path.resolve().parent != folder.resolve():
            return f"{name} is a link that leads out of the folder"
        mode = path.stat().st_mode
    except (OSError, RuntimeError) as error:
        return f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error}"
    return None if stat.S_ISREG(mode) else f"{name} is not a regular file"


def printable(text: str) -> str:
    r"""Return text of a foreign file, cut short, and without what a terminal obeys.

    Example:
        >>> printable("blocks.0\x1b[2J")
        'blocks.0\\x1b[2J'
    """
    if len(text) > MOST_CHARACTERS:
        text = text[:MOST_CHARACTERS] + " ..."
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )
