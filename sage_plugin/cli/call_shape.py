"""A call's shape from command-line options: the short flags that `tune` and `configs` share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sage_plugin.errors import UsageError
from sage_plugin.schema import LAYOUTS, MASK_KINDS, CallShape

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
MAX_SIZE = 2**31 - 1
"""Kernels count rows, channels and heads in 32 bits."""

MAX_SEED = 2**63 - 1


def dtype_name(text: str) -> str:
    """Torch's name of a dtype given in either spelling.

    Raises:
        UsageError: it is not one that attention takes.

    Example:
        >>> dtype_name("bf16")
        'bfloat16'
    """
    name = DTYPES.get(text, text)
    if name not in DTYPES.values():
        raise UsageError(f"--dtype {text!r}: use one of {', '.join((*DTYPES, *DTYPES.values()))}")
    return name


def mask_name(text: str) -> str:
    """A mask kind as it was given.

    Raises:
        UsageError: there is none of that name.

    Example:
        >>> mask_name("key_bias")
        'key_bias'
    """
    if text not in MASK_KINDS:
        raise UsageError(f"--mask {text!r}: use one of {', '.join(MASK_KINDS)}")
    return text


def checked_seed(seed: int) -> int:
    """A seed that every generator takes.

    Raises:
        UsageError: it is negative, or has more than 63 bits.

    Example:
        >>> checked_seed(3)
        3
    """
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"--seed {_short(seed)}: must be from 0 to 2**63 - 1")
    return seed


def _short(number: int | str) -> str:
    """A number as text, its middle left out where it is absurdly long."""
    text = str(number)
    return text if len(text) <= 40 else f"{text[:20]}...{text[-4:]} ({len(text)} digits)"


def lengths(texts: Sequence[str]) -> list[int]:
    """Numbers from repeated options, each of which may hold several with commas.

    Raises:
        UsageError: one is not a positive whole number that kernels can count to.

    Example:
        >>> lengths(["8192,16384", "512"])
        [8192, 16384, 512]
    """
    parts = [part.strip() for text in texts for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit()) or not part.strip("0"):
            raise UsageError(f"--seq-len {part!r}: whole numbers above 0, such as 8192,16384")
        if len(part) > len(str(MAX_SIZE)) or int(part) > MAX_SIZE:
            raise UsageError(f"--seq-len {_short(part)}: must be at most {MAX_SIZE}")
    return [int(part) for part in parts]


def call_shape(
    *,
    batch: int,
    heads_q: int,
    heads_k: int | None,
    seq_q: int,
    seq_k: int | None,
    head_dim: int,
    dv: int | None,
    dtype: str,
    causal: bool,
    layout: str,
    mask: str = "none",
) -> CallShape:
    """The shape of a call; key heads, key length and V's channels default to those of Q.

    Raises:
        UsageError: a size below 1 or beyond 32 bits, head counts that do not divide, an unknown
            dtype, layout or mask.
    """
    heads_k = heads_q if heads_k is None else heads_k
    sizes = {"-b": batch, "-hq": heads_q, "-hk": heads_k, "-sq": seq_q, "-d": head_dim}
    sizes |= {"-sk": seq_q if seq_k is None else seq_k, "-dv": head_dim if dv is None else dv}
    for option, size in sizes.items():
        if size < 1:
            raise UsageError(f"{option} {_short(size)}: must be at least 1")
        if size > MAX_SIZE:
            raise UsageError(f"{option} {_short(size)}: must be at most {MAX_SIZE}")
    if heads_q % heads_k:
        raise UsageError(f"-hq {heads_q} is not a multiple of -hk {heads_k}")
    if layout not in LAYOUTS:
        raise UsageError(f"--layout {layout!r}: use one of {', '.join(LAYOUTS)}")
    return CallShape(
        batch=batch,
        heads_q=heads_q,
        heads_k=heads_k,
        seq_q=seq_q,
        seq_k=sizes["-sk"],
        head_dim=head_dim,
        dv=sizes["-dv"],
        dtype=dtype_name(dtype),
        causal=causal,
        mask_kind=mask_name(mask),
        layout=layout,
        scale=1 / math.sqrt(head_dim),
    )
