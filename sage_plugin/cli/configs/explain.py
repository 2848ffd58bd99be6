"""`sage configs explain`: why a call gets its launch config, place by place."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sage_plugin.cli.configs.sources import As, facts_of
from sage_plugin.cli.console import say
from sage_plugin.cli.linear_options import LinearOptions
from sage_plugin.cli.options import (
    ConfigDir,
    Device,
    ShapeOptions,
    check_config_dir,
    flattened,
)
from sage_plugin.cli.paged_options import PagedOptions
from sage_plugin.errors import UsageError
from sage_plugin.paged_records import PagedShape
from sage_plugin.schema import (
    AnyKey,
    AnyShape,
    CallShape,
    DeviceFacts,
    LinearShape,
)

if TYPE_CHECKING:
    from sage_plugin.families.family import Family

EXAMPLE = "sage configs explain -b 1 -hq 8 -sq 4096 -d 128 --kernel sage"

Kernel = Annotated[str, typer.Option(help="Kernel, or kernel:variant.")]


@flattened
def command(
    shape: ShapeOptions,
    linears: LinearOptions,
    paged: PagedOptions,
    kernel: Kernel = "auto",
    config_dir: ConfigDir = None,
    device: Device = None,
    card: As = None,
) -> None:
    """Say why a call gets its launch config, place by place."""
    from sage_plugin.families import family

    check_config_dir(config_dir)
    facts = facts_of(device, card, config_dir)
    calls = _calls(shape, linears, paged)
    named = linears.kernels()[0] if kernel == "auto" and linears.kernels() else kernel
    for call in calls:
        _explain_call(family(linears.op), call, named, facts, config_dir)


def _calls(shape: ShapeOptions, linears: LinearOptions, paged: PagedOptions) -> Sequence[AnyShape]:
    """The calls that are spelt out, of the family that is named."""
    if linears.chosen:
        return linears.shapes(shape)
    if paged.chosen(linears.op):
        return paged.shapes(shape, linears.tp_size)
    if not shape.seq_len:
        raise UsageError("which call? Give its length (--seq-len), heads (-hq) and channels (-d)")
    return shape.shapes()


def _explain_call(
    family: Family, shape: AnyShape, kernel: str, facts: DeviceFacts, config_dir: Path | None
) -> None:
    name, variant = family.parse_kernel(kernel)
    decision = family.decide(shape, facts, kernel=name, variant=variant)
    if decision.reason is not None or decision.variant == "host":
        reason = decision.reason or f"{decision.kernel} is torch's own and has no launch config"
        what = "the host's attention" if isinstance(shape, CallShape) else "torch's own linear"
        say(f"This call goes to {what}: {reason}.")
        example = "fav3_sage" if isinstance(shape, CallShape) else "int8_row:triton"
        say(f"Next: name a kernel (--kernel {example}) to see what it would get")
        return
    _explain_key(family, family.call_key(shape, decision), facts, config_dir, shape)


def _explain_key(
    family: Family, key: AnyKey, facts: DeviceFacts, config_dir: Path | None, shape: AnyShape
) -> None:
    from sage_plugin.kernels import launch_config
    from sage_plugin.registry import lookup
    from sage_plugin.registry.config_words import config_text

    launch_config.forget()
    say(f"{key.kernel}:{key.variant} on {facts.name}: {family.describe(shape)}")
    sentences = lookup.explain(
        key,
        facts=facts,
        config_dir=config_dir,
        is_legal=lambda config: family.illegal_reason(config, key, facts) is None,
    )
    found = family.find_launch(
        key, facts, config_dir=None if config_dir is None else str(config_dir)
    )
    if found is None:
        say(f"{key.variant} has no launch config.")
        say(f"Next: --kernel {key.kernel}:triton, to see what ours would get on a GPU")
        return
    say(*(f"  {sentence}" for sentence in sentences))
    default = family.default_launch(key, facts)
    say(f"It gets {config_text(found.config, default)} ({found.mark}: {found.detail})")
    say(f"  {found.config.text()}")
    say(*(f"  stale: {change}" for change in found.stale))
    reason = family.illegal_reason(found.config, key, facts)
    say("  legal on this device" if reason is None else f"  illegal on this device: {reason}")
    if found.stale:
        say("Next: sage configs revalidate, which measures it again")
    elif found.source in ("exact", "env"):
        of_op = "" if isinstance(shape, CallShape) else f" --op {family.name}"
        say(f"Next: sage bench{of_op}, to see what it is worth")
    else:
        say(f"Next: {_tune_command(key, shape, config_dir)}")


def _tune_command(key: AnyKey, shape: AnyShape, config_dir: Path | None) -> str:
    """The command that fills a miss for exactly this call, in the place that was asked first."""
    words = ["sage", "tune", "--kernel", f"{key.kernel}:{key.variant}"]
    if isinstance(shape, LinearShape):
        words += _linear_words(shape)
    elif isinstance(shape, CallShape):
        words += _attention_words(shape)
    else:
        words += _paged_words(shape)
    words += ["--config-dir", str(config_dir)] if config_dir is not None else []
    return shlex.join(words)


def _linear_words(shape: LinearShape) -> list[str]:
    features = f"{shape.out_features}/{shape.in_features}"
    return [
        "--op", shape.family, "--out-in-features", features, "--batch-sizes", str(shape.rows),
        "--dtype", shape.dtype, *(("--groups", str(shape.groups)) if shape.groups else ()),
    ]  # fmt: skip


def _paged_words(shape: PagedShape) -> list[str]:
    return [
        "--op", shape.family, "--kind", shape.kind, "--page-size", str(shape.page_size),
        "--num-q-heads", str(shape.heads_q), "--num-kv-heads", str(shape.heads_k),
        "--max-model-len", str(shape.max_keys), "--num-sequences", str(len(shape.q_lens)),
        "--head-dim", str(shape.head_dim), "--dtype", shape.dtype, "--kv-dtype", shape.cache_dtype,
    ]  # fmt: skip


def _attention_words(shape: CallShape) -> list[str]:
    numbers = {"-b": shape.batch, "-hq": shape.heads_q, "-sq": shape.seq_q, "-d": shape.head_dim}
    if shape.heads_k != shape.heads_q:
        numbers["-hk"] = shape.heads_k
    if shape.seq_k != shape.seq_q:
        numbers["-sk"] = shape.seq_k
    words = [word for option, number in numbers.items() for word in (option, str(number))]
    words += ["--dtype", shape.dtype, "--layout", shape.layout]
    words += ["--causal"] if shape.causal else []
    words += ["--mask", shape.mask_kind] if shape.mask_kind != "none" else []
    return words
