"""Options that several commands share, each declared once; records of options as parameters."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.models import OptionInfo

from sage_plugin.errors import UsageError, did_you_mean
from sage_plugin.schema import KERNEL_ALIASES, KERNELS, LAYOUTS, MASK_KINDS, CallShape

if TYPE_CHECKING:
    from sage_plugin.families import Family
    from sage_plugin.replay.inputs import ReplayInputs
    from sage_plugin.schema import AnyShape, DeviceFacts

DEFAULT_FOLDER = Path("captured_inputs")
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
MAX_SIZE = 2**31 - 1
"""Kernels count rows, channels and heads in 32 bits."""

SHAPE_PANEL, MORE_PANEL = "Drawn inputs in place of captures", "More options"
MAX_SEED = 2**63 - 1
SOME_FAILED = 4
"""Exit code of a command that did a part of what it was asked for."""

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="FOLDER", help=f"Captures (default {DEFAULT_FOLDER})."),
]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1 or cpu (default: a GPU if any).")]
ConfigDir = Annotated[Path | None, typer.Option(help="Folder of configs that comes first.")]
Kernels = Annotated[
    list[str] | None,
    typer.Option(
        "--kernel",
        metavar="NAME",
        help="Kernel, or kernel:variant; repeatable. One of "
        f"{', '.join((*KERNELS, *KERNEL_ALIASES))} (default: by the device).",
    ),
]
METHOD_NAMES = ("--method", "--benchmarking-method")
OTHER_METHODS = {"amortized": "graph", "xprof": "profiler"}
"""Timing methods by the names that a tuner of TPUs gives them."""

StepRanges = Annotated[int, typer.Option(help="Ranges of denoising steps.")]


def flattened(command: Callable[..., None]) -> Callable[..., None]:
    """Turn the option records among a command's parameters into options, a field each."""
    hints = get_type_hints(command, include_extras=True)
    records: dict[str, Any] = {
        name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in records:
            parameters += _parameters_of(records[name])
        else:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=kind, annotation=hints[name]))

    def run(**given: Any) -> None:  # noqa: ANN401
        for name, record in records.items():
            names = {f.name for f in dataclasses.fields(record)} & given.keys()
            given[name] = record(**{one: given.pop(one) for one in names})
        command(**given)

    run.__doc__, run.__name__, run.__annotations__ = command.__doc__, command.__name__, {}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameters_of(record: Any) -> list[inspect.Parameter]:  # noqa: ANN401
    hints = get_type_hints(record, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(f.name, kind, default=f.default, annotation=hints[f.name])
        for f in dataclasses.fields(record)
    ]


def shown_first(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Name the options of a flattened command that its help shows first, the others in panels."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        parameters = [_in_panel(one, names) for one in signature.parameters.values()]
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=parameters
        )
        return command

    return decorate


def _in_panel(parameter: inspect.Parameter, first: Sequence[str]) -> inspect.Parameter:
    declared = parameter.annotation.__metadata__[0]
    if parameter.name in first or not isinstance(declared, OptionInfo):
        return parameter
    option = copy.copy(declared)
    shapes = {field.name for field in dataclasses.fields(DrawnInputOptions)} - {"seed"}
    of_kind = SHAPE_PANEL if parameter.name in shapes else MORE_PANEL
    option.rich_help_panel = option.rich_help_panel or of_kind
    return parameter.replace(annotation=Annotated[parameter.annotation.__origin__, option])


def examples(*commands: str) -> str:
    """Write the end of a command's help: commands that run as they stand."""
    return "\n\n".join(["Examples:", *commands])


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """A call's shape as options spell it; `None` for what was not given."""

    seq_len: Annotated[
        list[str] | None, typer.Option("--seq-len", "-sq", help="Query lengths, as 8192,16384.")
    ] = None
    seq_len_k: Annotated[
        int | None, typer.Option("--seq-len-k", "-sk", help="Key length (default: the query's).")
    ] = None
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", "-b", help="Batch (default 1).")
    ] = None
    num_heads: Annotated[
        int | None, typer.Option("--num-heads", "-hq", help="Query heads (default 5).")
    ] = None
    num_heads_k: Annotated[
        int | None, typer.Option("--num-heads-k", "-hk", help="Key heads (default: the query's).")
    ] = None
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", "-d", help="Channels of a head (default 128).")
    ] = None
    head_dim_v: Annotated[
        int | None,
        typer.Option("--head-dim-v", "-dv", help="Channels of V (default: -d)."),
    ] = None
    layout: Annotated[str | None, typer.Option(help="bhsd (default) or bshd.")] = None
    causal: Annotated[bool, typer.Option("--causal", "-causal", help="Causal mask.")] = False
    dtype: Annotated[str | None, typer.Option(help="bf16 (default), fp16 or fp32.")] = None
    mask: Annotated[
        str | None, typer.Option(help="none (default), key_bias (padding) or dense (blocks).")
    ] = None

    def given(self) -> list[str]:
        """List the options that were given, by their long names."""
        return given_of(self, "seed")

    def shapes(self) -> list[CallShape]:
        """Return the shape of each length; key heads, lengths and V's channels default to Q's."""
        if not self.seq_len:
            raise UsageError(f"{', '.join(self.given())} without a length: add --seq-len N")
        return [self._shape(length) for length in lengths(self.seq_len)]

    def _shape(self, seq_q: int) -> CallShape:
        heads_q, head_dim = _or(self.num_heads, 5), _or(self.head_dim, 128)
        sizes = {
            "-b": _or(self.batch_size, 1),
            "-hq": heads_q,
            "-hk": _or(self.num_heads_k, heads_q),
            "-sq": seq_q,
            "-sk": _or(self.seq_len_k, seq_q),
            "-d": head_dim,
            "-dv": _or(self.head_dim_v, head_dim),
        }
        for option, size in sizes.items():
            if size < 1:
                raise UsageError(f"{option} {_short(size)}: must be at least 1")
            if size > MAX_SIZE:
                raise UsageError(f"{option} {_short(size)}: must be at most {MAX_SIZE}")
        if heads_q % sizes["-hk"]:
            raise UsageError(f"-hq {heads_q} is not a multiple of -hk {sizes['-hk']}")
        batch, _, heads_k, _, seq_k, _, dv = sizes.values()
        return CallShape(
            batch=batch, heads_q=heads_q, heads_k=heads_k, seq_q=seq_q, seq_k=seq_k,
            head_dim=head_dim, dv=dv, dtype=dtype_name(self.dtype or "bf16"), causal=self.causal,
            mask_kind=one_of("--mask", self.mask or "none", MASK_KINDS),
            layout=one_of("--layout", self.layout or "bhsd", LAYOUTS),
            scale=1 / math.sqrt(head_dim),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DrawnInputOptions(ShapeOptions):
    """Inputs that are drawn: presets or a shape, and their values; captures where neither is."""

    preset: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Preset shape, or all; repeatable.")
    ] = None
    inputs_distribution: Annotated[
        str | None,
        typer.Option(help="Of drawn values: normal (default), biased, drift or outlier."),
    ] = None
    seed: Annotated[int, typer.Option(help="Of drawn values, and of what is shuffled.")] = 0

    def inputs(self) -> list[ReplayInputs]:
        """Return the inputs to draw; empty if no shape is spelt out or named."""
        from sage_plugin.families import ATTENTION
        from sage_plugin.measure.inputs import presets

        of_values = ("--dtype", "--mask", "--inputs-distribution", "--preset")
        sizes = [option for option in self.given() if option not in of_values]
        if self.preset and sizes:
            raise UsageError(f"--preset names whole shapes: leave {sizes[0]} out")
        if self.preset:
            known = presets()
            for name in self.preset:
                one_of("--preset", name, (*known, "all"))
            names = list(known) if "all" in self.preset else list(dict.fromkeys(self.preset))
            mask = one_of("--mask", self.mask or "none", MASK_KINDS)
            named = {name: dataclasses.replace(known[name], mask_kind=mask) for name in names}
            if self.dtype is not None:
                dtype = dtype_name(self.dtype)
                named = {n: dataclasses.replace(one, dtype=dtype) for n, one in named.items()}
        else:
            named = {ATTENTION.describe(shape): shape for shape in self.shapes()} if sizes else {}
        for shape in named.values():
            if shape.dv != shape.head_dim:
                raise UsageError(
                    f"-dv {shape.dv} differs from -d {shape.head_dim}: the kernels here need V as "
                    "wide as Q and K; leave -dv out"
                )
        return self.drawn(named.items())

    def drawn(self, named: Iterable[tuple[str, AnyShape]], *more: str) -> list[ReplayInputs]:
        """Return inputs with drawn values.

        Args:
            named: shapes, each with a name before it.
            more: distributions that are allowed beside the usual ones.
        """
        from sage_plugin.measure.inputs import DISTRIBUTIONS
        from sage_plugin.replay.inputs import ReplayInputs

        check_seed(self.seed)
        distribution = one_of(
            "--inputs-distribution", self.inputs_distribution or "normal", (*DISTRIBUTIONS, *more)
        )
        return [
            ReplayInputs(shape, name, distribution=distribution, seed=self.seed)
            for name, shape in named
        ]

    def refuse_with_captures(self) -> None:
        """Refuse what would change captures, which are replayed as they are."""
        check_seed(self.seed)
        if given := self.given():
            raise UsageError(f"{given[0]} does not change captures: leave it out, or the captures")


def given_of(record: Any, *others: str) -> list[str]:  # noqa: ANN401
    """List the options of a record that were given, by their long names, but for some fields."""
    return [
        f"--{field.name.replace('_', '-')}"
        for field in dataclasses.fields(record)
        if field.name not in others and getattr(record, field.name) not in (field.default, [])
    ]


def folder_of(words: Sequence[str] | None, inputs: DrawnInputOptions) -> Path | None:
    """Return the folder among a command's words; numbers behind --seq-len are further lengths."""
    names = list(words or ())
    if inputs.seq_len:
        further = [name for name in names if name.replace(",", "").isdigit()]
        inputs.seq_len.extend(further)
        names = [name for name in names if name not in further]
    if len(names) > 1:
        raise UsageError(f"{', '.join(names)}: give one folder of captures")
    return Path(names[0]) if names else None


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    """Return a value that is one of those allowed."""
    if value not in allowed:
        raise UsageError(
            f"{option} {value!r}: allowed are {', '.join(allowed)}{did_you_mean(value, allowed)}"
        )
    return value


def method_name(text: str | None) -> str | None:
    """Return our name of a timing method given in either spelling."""
    return None if text is None else OTHER_METHODS.get(text, text)


def dtype_name(text: str) -> str:
    """Return torch's name of a dtype given in either spelling."""
    return DTYPES.get(text) or one_of("--dtype", text, (*DTYPES, *DTYPES.values()))


def check_config_dir(folder: Path | None) -> None:
    """See that configs can be read there, if the folder was named."""
    if folder is not None and not os.path.isdir(folder):
        raise UsageError(f"--config-dir {folder}: no such folder")


def check_seed(seed: int) -> None:
    """See that every generator takes a seed."""
    if not 0 <= seed <= MAX_SEED:
        raise UsageError(f"--seed {_short(seed)}: must be from 0 to 2**63 - 1")


def lengths(texts: Sequence[str], option: str = "--seq-len") -> list[int]:
    """Read numbers from repeated options, each of which may hold several with commas."""
    parts = [part.strip() for text in texts for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit()) or not part.strip("0"):
            raise UsageError(f"{option} {part!r}: whole numbers above 0, such as 8192,16384")
        if len(part) > len(str(MAX_SIZE)) or int(part) > MAX_SIZE:
            raise UsageError(f"{option} {_short(part)}: must be at most {MAX_SIZE}")
    return [int(part) for part in parts]


def _short(number: int | str) -> str:
    """A number as text, its middle left out if it is absurdly long."""
    text = str(number)
    return text if len(text) <= 40 else f"{text[:20]}...{text[-4:]} ({len(text)} digits)"


def named_kernels(
    names: Sequence[str], facts: DeviceFacts, family: Family | None = None
) -> tuple[tuple[str, str], ...]:
    """Return the named kernels; by default all that the device runs, but not the oracle itself."""
    from sage_plugin.families import ATTENTION

    family = family or ATTENTION
    named = [family.parse_kernel(text) for text in names]
    if any(kernel == "auto" for kernel, _ in named):
        raise UsageError("--kernel auto: name the kernels to compare, or leave --kernel out")
    every = [(kernel, "auto") for kernel in family.kernels_of(facts) if kernel != "torch"]
    return tuple(named or every)
