"""`sage configs explain`: why a call gets its launch config, place by place."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from sage_plugin.cli.configs.card import As, facts_of
from sage_plugin.cli.console import say
from sage_plugin.cli.options import (
    ConfigDir,
    Device,
    ShapeOptions,
    check_config_dir,
    flattened,
)
from sage_plugin.errors import UsageError
from sage_plugin.schema import CallKey, CallShape, DeviceFacts

EXAMPLE = "sage configs explain -b 1 -hq 8 -sq 4096 -d 128 --kernel sage"

Kernel = Annotated[str, typer.Option(help="Kernel, or kernel:variant.")]


@flattened
def command(
    shape: ShapeOptions,
    kernel: Kernel = "auto",
    config_dir: ConfigDir = None,
    device: Device = None,
    card: As = None,
) -> None:
    """Say why a call gets its launch config, place by place."""
    if not shape.seq_len:
        raise UsageError("which call? Give its length (--seq-len), heads (-hq) and channels (-d)")
    check_config_dir(config_dir)
    facts = facts_of(device, card, config_dir)
    for call in shape.shapes():
        _explain_call(call, kernel, facts, config_dir)


def _explain_call(
    shape: CallShape, kernel: str, facts: DeviceFacts, config_dir: Path | None
) -> None:
    from sage_plugin.families import ATTENTION

    name, variant = ATTENTION.parse_kernel(kernel)
    decision = ATTENTION.decide(shape, facts, kernel=name, variant=variant)
    if decision.reason is not None or decision.variant == "host":
        reason = decision.reason or f"{decision.kernel} is torch's own and has no launch config"
        say(f"This call goes to the host's attention: {reason}.")
        say("Next: name a kernel (--kernel fav3_sage) to see what it would get")
        return
    _explain_key(ATTENTION.call_key(shape, decision), facts, config_dir, shape)


def _explain_key(
    key: CallKey, facts: DeviceFacts, config_dir: Path | None, shape: CallShape
) -> None:
    from sage_plugin.families import ATTENTION
    from sage_plugin.registry import lookup
    from sage_plugin.registry.config_words import config_text

    ATTENTION.forget()
    say(f"{key.kernel}:{key.variant} on {facts.name}: {ATTENTION.describe(shape)}")
    sentences = lookup.explain(
        key,
        facts=facts,
        config_dir=config_dir,
        is_legal=lambda config: ATTENTION.illegal_reason(config, key, facts) is None,
    )
    say(*(f"  {sentence}" for sentence in sentences))
    found = ATTENTION.find_launch(
        key, facts, config_dir=None if config_dir is None else str(config_dir)
    )
    default = ATTENTION.default_launch(key, facts)
    say(f"It gets {config_text(found.config, default)} ({found.mark}: {found.detail})")
    say(f"  {found.config.text()}")
    say(*(f"  stale: {change}" for change in found.stale))
    reason = ATTENTION.illegal_reason(found.config, key, facts)
    say("  legal on this device" if reason is None else f"  illegal on this device: {reason}")
    if found.stale:
        say("Next: sage configs revalidate, which measures it again")
    elif found.source in ("exact", "env"):
        say("Next: sage bench, to see what it is worth")
    else:
        say(f"Next: {_tune_command(key, shape, config_dir)}")


def _tune_command(key: CallKey, shape: CallShape, config_dir: Path | None) -> str:
    """The command that fills a miss for exactly this call, in the place that was asked first."""
    words = ["sage", "tune", "--kernel", f"{key.kernel}:{key.variant}"]
    numbers = {"-b": shape.batch, "-hq": shape.heads_q, "-sq": shape.seq_q, "-d": shape.head_dim}
    if shape.heads_k != shape.heads_q:
        numbers["-hk"] = shape.heads_k
    if shape.seq_k != shape.seq_q:
        numbers["-sk"] = shape.seq_k
    words += [word for option, number in numbers.items() for word in (option, str(number))]
    words += ["--dtype", shape.dtype, "--layout", shape.layout]
    words += ["--causal"] if shape.causal else []
    words += ["--mask", shape.mask_kind] if shape.mask_kind != "none" else []
    words += ["--config-dir", str(config_dir)] if config_dir is not None else []
    return shlex.join(words)
