"""What `patch` was asked for, refused in one sentence where it can mean nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from sage_plugin.errors import ConfigError, UnknownKernelError, UsageError
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.linear.rows.row_format import ROTATIONS
from sage_plugin.plugin.context import PatchOptions
from sage_plugin.plugin.linears.smoothing import Smoothing
from sage_plugin.plugin.linears.smoothing import read as read_smoothing
from sage_plugin.plugin.options.texts import texts
from sage_plugin.plugin.policy.rules import BASELINE, Policy
from sage_plugin.plugin.policy.rules import chosen as chosen_policy
from sage_plugin.schema import LINEAR_KERNELS

MIN_SEQ = 1024
ON_UNSUPPORTED = ("fallback", "error")
LINEARS = ("auto", *(kernel for kernel in LINEAR_KERNELS if kernel != BASELINE))


def checked_options(
    kernel: str = "auto",
    variant: str = "auto",
    config_dir: str | os.PathLike[str] | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    min_seq: int = MIN_SEQ,
    on_unsupported: str = "fallback",
    check_finite: bool = False,
    policy: str | os.PathLike[str] | Policy | None = None,
    linears: str | None = None,
    keep_originals: bool = True,
    rotation: int = 0,
    smoothing: str | os.PathLike[str] | None = None,
) -> PatchOptions:
    """The options of a patch, checked; errors are those of `patch`."""
    _check_kinds(
        (str, "text", {"kernel": kernel, "variant": variant}),
        (bool, "True or False", {"check_finite": check_finite, "keep_originals": keep_originals}),
    )
    text = kernel if ":" in kernel or variant == "auto" else f"{kernel}:{variant}"
    kernel, variant = dispatch.parse_kernel(text)
    if config_dir is not None:
        _check_kinds((str | os.PathLike, "a path", {"config_dir": config_dir}))
        config_dir = os.path.expanduser(config_dir)
        if not os.path.isdir(config_dir):
            raise ConfigError(f"config_dir {os.fspath(config_dir)!r} is not a folder")
    if not isinstance(min_seq, int) or min_seq < 0:
        raise UsageError(f"min_seq is {min_seq!r}; it is a number of tokens, 0 or more")
    if on_unsupported not in ON_UNSUPPORTED:
        raise UsageError(
            f"on_unsupported is {on_unsupported!r}; choose one of {', '.join(ON_UNSUPPORTED)}"
        )
    if policy is not None and (kernel, variant) != ("auto", "auto"):
        raise UsageError(
            f"kernel {kernel!r} and a policy were given; a policy names the kernels itself"
        )
    rules = None if policy is None else chosen_policy(policy)
    _check_rotation(rotation, linears)
    return PatchOptions(
        policy=rules,
        kernel=kernel,
        variant=variant,
        config_dir=None if config_dir is None else os.fspath(config_dir),
        min_seq=min_seq,
        strict=on_unsupported == "error",
        check_finite=check_finite,
        include=None if include is None else _globs("include", include),
        exclude=_globs("exclude", exclude or ()),
        linears=_checked_linears(linears),
        keep_originals=keep_originals,
        rotation=rotation,
        smoothing=_factors(smoothing, rules, linears),
        smooth_linears=smoothing is not None,
    )


def _check_rotation(rotation: int, linears: str | None) -> None:
    """Raise unless linears can be rotated so.

    Raises:
        UsageError: no such block, or no linears.
    """
    if rotation not in ROTATIONS or isinstance(rotation, bool):
        raise UsageError(
            f"rotation is {rotation!r}; choose one of {', '.join(map(str, ROTATIONS))}"
        )
    if rotation and linears is None:
        raise UsageError(
            f"rotation is {rotation} and linears is None; name their kernel with linears=, or "
            "rotate in a rule of the policy"
        )


def _factors(
    smoothing: str | os.PathLike[str] | None, policy: Policy | None, linears: str | None
) -> Smoothing | None:
    """The factors of smoothing: of the argument, or of the policy that has rules with them.

    Raises:
        UsageError: there is nothing to smooth.
        ConfigError: there are none, or the file is not one of factors.
    """
    smooths = policy is not None and policy.smooths
    if smoothing is not None:
        _check_kinds((str | os.PathLike, "a path", {"smoothing": smoothing}))
        if linears is None and not smooths:
            raise UsageError(
                "smoothing is given and neither linears nor a rule of the policy uses it; name "
                "their kernel with linears="
            )
        return read_smoothing(smoothing)
    if policy is None or not smooths:
        return None
    if not policy.smoothing:
        raise ConfigError(
            "the policy has rules with smoothing and names no file of factors; write one with "
            "`sage policy smoothing`, and name it with smoothing="
        )
    return read_smoothing(policy.smoothing)


def _checked_linears(linears: str | None) -> str | None:
    """The kernel that linears are asked to run on, `None` to leave them.

    Raises:
        UnknownKernelError: it quantizes no linear.
    """
    if linears is not None and linears not in LINEARS:
        raise UnknownKernelError(
            f"linears is {linears!r}; choose one of {', '.join(LINEARS)}, or None to leave them"
        )
    return linears


def _globs(name: str, patterns: str | Iterable[str]) -> tuple[str, ...]:
    globs = texts(patterns)
    if globs is None:
        raise UsageError(f"{name} is {patterns!r}; it is a glob of layer paths, or a list of them")
    return globs


def _check_kinds(*wanted: tuple[Any, str, dict[str, object]]) -> None:
    """Raise unless arguments are of the types that they need to be.

    Args:
        wanted: a type, what it is in words, and arguments by name.

    Raises:
        UsageError: one is not.
    """
    for kind, words, given in wanted:
        for name, value in given.items():
            if not isinstance(value, kind):
                raise UsageError(f"{name} is {value!r}; it needs to be {words}")
