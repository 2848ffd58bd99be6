"""What a layer can run on: a kernel, and for attention changed fields of its launch config."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Any, Self

from sage_plugin.errors import ConfigError, UsageError
from sage_plugin.families import Family, family
from sage_plugin.kernels.contract import Decision
from sage_plugin.plugin.policy.rules import BASELINES, TUNABLE
from sage_plugin.schema import (
    ATTENTION,
    LINEAR,
    LINEAR_KERNELS,
    AnyShape,
    CallShape,
    DeviceFacts,
    LaunchConfig,
    LinearLaunch,
)

TYPES: dict[str, type] = typing.get_type_hints(LaunchConfig)
MAX_DIGITS = 6
QUANTIZED = ("sage", "fav3_sage", "fav3_fp8")


Runnable = tuple[Decision, LaunchConfig | LinearLaunch | None]
"""An option made concrete for one shape: what its family is called with. A product of torch's has
no launch config."""


@dataclass(frozen=True, slots=True)
class Option:
    """A kernel with changed fields, such as `fav3_sage+hadamard`.

    Attributes:
        kernel: kernel name.
        variant: variant name, or `"auto"`.
        launch: names and values of the changed fields, sorted by name.
        op: op family that it is of.

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
    op: str = ATTENTION

    @property
    def family(self) -> Family:
        """The op family that it is of."""
        return family(self.op)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `kernel[:variant][+field=value]...`; the names of kernels tell their op family.

        Raises:
            UnknownKernelError: no such kernel or variant.
            UsageError: a field that launch configs have not, or `auto` and a baseline, whose choice
                is not a kernel's.
        """
        name, *parts = text.split("+")
        op = LINEAR if name.partition(":")[0] in LINEAR_KERNELS else ATTENTION
        kernel, variant = family(op).parse_kernel(name)
        if kernel in ("auto", "torch", *BASELINES.values()):
            raise UsageError(
                f"--kernel {name!r}: a policy chooses among kernels by name; what the model has of "
                "its own is always among them"
            )
        if op == LINEAR and (parts or variant != "auto"):
            raise UsageError(
                f"--kernel {text!r}: a rule of linears has a kernel alone; write {kernel}"
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
        return cls(kernel, variant, tuple(sorted(launch.items())), op)

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
        decision = self.family.decide(shape, facts, kernel=self.kernel, variant=self.variant)
        if decision.reason is not None:
            return str(decision.reason)
        key = self.family.call_key(shape, decision)
        found = self.family.find_launch(key, facts, config_dir=config_dir)
        if found is None:
            return decision, None
        try:
            config = found.config.replaced(**self.fields)
        except ConfigError as error:
            return str(error)
        reason = self.family.illegal_reason(config, key, facts)
        return (decision, config) if reason is None else reason


def default_options(facts: DeviceFacts, shape: AnyShape) -> tuple[Option, ...]:
    """List the kernels that a device runs, the quantized ones of attention also with Q, K rotated.

    A rotation spreads outliers over a head's channels: it costs time and saves error.
    """
    op = shape.family
    names = [k for k in family(op).kernels_of(facts) if k not in ("torch", BASELINES[op])]
    if not isinstance(shape, CallShape):
        return tuple(Option(kernel, op=op) for kernel in names)
    rotated = shape.head_dim & -shape.head_dim  # the greatest power of two that divides it
    options = []
    for kernel in names:
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
