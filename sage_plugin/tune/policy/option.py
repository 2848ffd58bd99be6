"""What a layer can run on: a kernel, and for attention changed fields of its launch config."""

from __future__ import annotations

import typing
from dataclasses import dataclass, replace
from typing import Any, Self

from sage_plugin.errors import ConfigError, UsageError
from sage_plugin.families import Family, family
from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.linear.rows.row_format import ROTATIONS
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

TYPES: dict[str, type] = {
    name: kind for name, kind in typing.get_type_hints(LaunchConfig).items() if name in TUNABLE
}
OF_LINEARS: dict[str, type] = {"rotation": int, "smoothing": bool}
"""What a rule says of linears' input channels."""
MAX_DIGITS = 6
QUANTIZED = ("sage", "fav3_sage", "fav3_fp8")
INT8 = ("int8_row",)


Runnable = tuple[Decision, LaunchConfig | LinearLaunch | None]
"""An option made concrete for one shape: what its family is called with. A product of torch's has
no launch config."""


@dataclass(frozen=True, slots=True)
class Option:
    """A kernel with changed fields, such as `fav3_sage+hadamard` or `int8_row+rotation=256`.

    Attributes:
        kernel: kernel name.
        variant: variant name, or `"auto"`.
        launch: names and values of the changed fields, sorted by name: of attention's launch
            config, of linears what a rule says of their input channels.
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
        if op == LINEAR and variant != "auto":
            raise UsageError(
                f"--kernel {text!r}: a rule of linears names no backend; write {kernel}"
            )
        known, of = (OF_LINEARS, "linears") if op == LINEAR else (TYPES, "launch configs")
        launch = {}
        for part in parts:
            field, _, value = part.partition("=")
            if field not in known:
                raise UsageError(
                    f"--kernel {text!r}: {of} have no field {field!r}; they have "
                    f"{', '.join(sorted(known))}"
                )
            launch[field] = _value(text, field, value, known[field])
        option = cls(kernel, variant, tuple(sorted(launch.items())), op)
        if op == LINEAR and option.rotation not in ROTATIONS:
            raise UsageError(
                f"--kernel {text!r}: rotation is one of {', '.join(map(str, ROTATIONS))}"
            )
        return option

    @property
    def fields(self) -> dict[str, Any]:
        """The changed fields of attention's launch config, as a rule holds them."""
        return {} if self.op == LINEAR else dict(self.launch)

    @property
    def rotation(self) -> int:
        """Most input channels of a block of a linear that is rotated, 0 for none."""
        return dict(self.launch).get("rotation", 0) if self.op == LINEAR else 0

    @property
    def smoothing(self) -> bool:
        """Whether input channels of a linear are divided by factors."""
        return self.op == LINEAR and dict(self.launch).get("smoothing", False)

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


def default_options(
    facts: DeviceFacts, shape: AnyShape, *, smoothing: bool = False
) -> tuple[Option, ...]:
    """List the kernels that a device runs, and some with the outliers of channels spread.

    A rotation, of Q and K or of a linear's input, spreads outliers over channels: it costs time and
    saves error, with linears that of INT8.

    Args:
        facts: the device.
        shape: of a call of the op family.
        smoothing: whether there are factors of smoothing, which linears are tried with.
    """
    op = shape.family
    names = [k for k in family(op).kernels_of(facts) if k not in ("torch", BASELINES[op])]
    if not isinstance(shape, CallShape):
        plain = [Option(kernel, op=op) for kernel in names]
        blocks, factors = (("rotation", ROTATIONS[-1]),), (("smoothing", True),)
        rotated = [replace(one, launch=blocks) for one in plain if one.kernel in INT8]
        smooth = [replace(one, launch=factors) for one in plain if smoothing]
        return (*plain, *rotated, *smooth)
    block = shape.head_dim & -shape.head_dim  # the greatest power of two that divides it
    options = []
    for kernel in names:
        options.append(Option(kernel))
        if kernel in QUANTIZED and block > 1:
            options.append(Option(kernel, launch=(("hadamard", block),)))
    return tuple(options)


def _value(text: str, field: str, value: str, kind: type) -> int | bool | str:
    if kind is bool and value in ("true", "false"):
        return value == "true"
    if kind is int and value.isascii() and value.isdigit() and len(value) <= MAX_DIGITS:
        return int(value)
    if kind is str and value:
        return value
    wanted = {bool: "true or false", int: "a whole number", str: "a word"}[kind]
    raise UsageError(f"--kernel {text!r}: {field} takes {wanted}, as {field}=...")
