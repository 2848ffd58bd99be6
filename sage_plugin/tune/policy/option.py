"""What a layer can run on: a kernel, and fields of its launch config that are changed."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Any, Self

from sage_plugin.errors import ConfigError, UsageError
from sage_plugin.families import ATTENTION
from sage_plugin.kernels.contract import Decision
from sage_plugin.plugin.policy.rules import HOST, TUNABLE
from sage_plugin.schema import AnyShape, DeviceFacts, LaunchConfig

TYPES: dict[str, type] = typing.get_type_hints(LaunchConfig)
MAX_DIGITS = 6
QUANTIZED = ("sage", "fav3_sage", "fav3_fp8")


Runnable = tuple[Decision, LaunchConfig]
"""An option made concrete for one shape: what `attention()` is called with."""


@dataclass(frozen=True, slots=True)
class Option:
    """A kernel with changed fields, such as `fav3_sage+hadamard`.

    Attributes:
        kernel: kernel name.
        variant: variant name, or `"auto"`.
        launch: names and values of the changed fields, sorted by name.

    Example:
        >>> option = Option.parse("fav3_sage+hadamard=64+smooth_v=false")
        >>> option.fields
        {'hadamard': 64, 'smooth_v': False}
        >>> option.label
        'fav3_sage+hadamard=64+smooth_v=false'
    """

    kernel: str
    variant: str = "auto"
    launch: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `kernel[:variant][+field=value]...`.

        Raises:
            UnknownKernelError: no such kernel or variant.
            UsageError: a field that launch configs have not, or `auto`, `sdpa` and `torch`, whose
                choice is not a kernel's.
        """
        name, *parts = text.split("+")
        kernel, variant = ATTENTION.parse_kernel(name)
        if kernel in ("auto", HOST, "torch"):
            raise UsageError(
                f"--kernel {name!r}: a policy chooses among kernels by name; the host's attention "
                "is always among them"
            )
        launch = {}
        for part in parts:
            field, _, value = part.partition("=")
            if field not in TUNABLE:
                raise UsageError(
                    f"--kernel {text!r}: launch configs have no field {field!r}; they have "
                    f"{', '.join(sorted(TUNABLE))}"
                )
            launch[field] = _value(text, field, value)
        return cls(kernel, variant, tuple(sorted(launch.items())))

    @property
    def fields(self) -> dict[str, Any]:
        """The changed fields as a rule holds them."""
        return dict(self.launch)

    @property
    def name(self) -> str:
        """Kernel, and variant where one is named, as a rule holds it."""
        return self.kernel if self.variant == "auto" else f"{self.kernel}:{self.variant}"

    @property
    def label(self) -> str:
        """The text that `parse` reads."""
        words = (str(v).lower() if isinstance(v, bool) else str(v) for _, v in self.launch)
        names = (name for name, _ in self.launch)
        return "+".join((self.name, *map("=".join, zip(names, words, strict=True))))

    def runnable(
        self, shape: AnyShape, facts: DeviceFacts, config_dir: str | None
    ) -> Runnable | str:
        """Return what a call of this shape would run, or why it cannot."""
        decision = ATTENTION.decide(shape, facts, kernel=self.kernel, variant=self.variant)
        if decision.reason is not None:
            return str(decision.reason)
        key = ATTENTION.call_key(shape, decision)
        config = ATTENTION.find_launch(key, facts, config_dir=config_dir).config
        try:
            config = config.replaced(**self.fields)
        except ConfigError as error:
            return str(error)
        reason = ATTENTION.illegal_reason(config, key, facts)
        return (decision, config) if reason is None else reason


def default_options(facts: DeviceFacts, head_dim: int) -> tuple[Option, ...]:
    """List the kernels that a device runs, the quantized ones also with rotated Q and K.

    A rotation spreads outliers over a head's channels: it costs time and saves error.
    """
    rotated = head_dim & -head_dim  # the greatest power of two that divides it
    options = []
    for kernel in ATTENTION.kernels_of(facts):
        if kernel in (HOST, "torch"):
            continue
        options.append(Option(kernel))
        if kernel in QUANTIZED and rotated > 1:
            options.append(Option(kernel, launch=(("hadamard", rotated),)))
    return tuple(options)


def _value(text: str, field: str, value: str) -> int | bool | str:
    kind = TYPES[field]
    if kind is bool and value in ("true", "false"):
        return value == "true"
    if kind is int and value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS:
        return int(value)
    if kind is str and value:
        return value
    wanted = {bool: "true or false", int: "a whole number", str: "a word"}[kind]
    raise UsageError(f"--kernel {text!r}: {field} takes {wanted}, as {field}=...")
