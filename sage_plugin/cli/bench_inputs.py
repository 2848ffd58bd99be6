"""From the options of `sage bench` to its inputs: a folder, presets or an explicit shape."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sage_plugin.cli.call_shape import call_shape, checked_seed, dtype_name, mask_name
from sage_plugin.errors import UsageError
from sage_plugin.schema import CallShape

if TYPE_CHECKING:
    from sage_plugin.bench.suite import Suite

DEFAULT_FOLDER = Path("captured_inputs")


@dataclass(frozen=True, slots=True)
class BenchInputOptions:
    """The options that choose inputs, as they were given; `None` where they were not."""

    folder: Path | None = None
    presets: tuple[str, ...] = ()
    batch: int | None = None
    heads_q: int | None = None
    heads_k: int | None = None
    seq_q: int | None = None
    seq_k: int | None = None
    head_dim: int | None = None
    dim_v: int | None = None
    dtype: str | None = None
    causal: bool = False
    layout: str | None = None
    max_inputs: int | None = None
    distribution: str | None = None
    seed: int = 0
    mask: str | None = None

    @property
    def has_shape(self) -> bool:
        """Whether any size was given."""
        sizes = (self.batch, self.heads_q, self.heads_k, self.seq_q, self.seq_k)
        return any(size is not None for size in (*sizes, self.head_dim, self.dim_v))


def suite_of(asked: BenchInputOptions) -> Suite:
    """The inputs: exactly one of a folder, presets and an explicit shape.

    Raises:
        UsageError: options that exclude each other, or a value that is not allowed.
        CaptureError: a folder without usable captures.
    """
    from sage_plugin.bench import suite
    from sage_plugin.measure.inputs import DISTRIBUTIONS

    checked_seed(asked.seed)
    if sum((asked.folder is not None, bool(asked.presets), asked.has_shape)) > 1:
        raise UsageError("give one of a capture folder, --preset and a shape (-b -hq -sq -d)")
    if not asked.presets and not asked.has_shape:
        _refuse_synthetic_options(asked)
        return suite.captured(asked.folder or DEFAULT_FOLDER, asked.max_inputs)
    if asked.max_inputs is not None:
        raise UsageError("--max-inputs goes with a capture folder")
    distribution = asked.distribution or "normal"
    if distribution not in DISTRIBUTIONS:
        raise UsageError(
            f"--inputs-distribution {distribution!r}: allowed are {', '.join(DISTRIBUTIONS)}"
        )
    dtype = None if asked.dtype is None else dtype_name(asked.dtype)
    if asked.has_shape:
        shape = _shape(asked, dtype or "bfloat16")
        return suite.explicit(shape, distribution=distribution, seed=asked.seed)
    if asked.causal or asked.layout is not None:
        raise UsageError("--causal and --layout go with an explicit shape (-b -hq -sq -d)")
    return suite.preset(
        asked.presets,
        distribution=distribution,
        seed=asked.seed,
        dtype=dtype,
        mask_kind=mask_name(asked.mask or "none"),
    )


def _refuse_synthetic_options(asked: BenchInputOptions) -> None:
    """Captures are what they are: nothing that would change them is taken and ignored."""
    given = {
        "--dtype": asked.dtype is not None,
        "--causal": asked.causal,
        "--layout": asked.layout is not None,
        "--inputs-distribution": asked.distribution is not None,
        "--mask": asked.mask is not None,
    }
    names = [name for name, is_given in given.items() if is_given]
    if names:
        raise UsageError(f"{names[0]} does not change captures: leave it out, or give a shape")


def _shape(asked: BenchInputOptions, dtype: str) -> CallShape:
    batch, heads_q, seq_q, head_dim = asked.batch, asked.heads_q, asked.seq_q, asked.head_dim
    if batch is None or heads_q is None or seq_q is None or head_dim is None:
        given = {"-b": batch, "-hq": heads_q, "-sq": seq_q, "-d": head_dim}
        missing = [flag for flag, value in given.items() if value is None]
        raise UsageError(f"an explicit shape needs {', '.join(missing)} too")
    return call_shape(
        batch=batch,
        heads_q=heads_q,
        heads_k=asked.heads_k,
        seq_q=seq_q,
        seq_k=asked.seq_k,
        head_dim=head_dim,
        dv=asked.dim_v,
        dtype=dtype,
        causal=asked.causal,
        layout=asked.layout or "bhsd",
        mask=asked.mask or "none",
    )
