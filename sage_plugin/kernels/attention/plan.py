"""What is settled of a call before its data is touched: checked, decided and looked up, once a key.

The key is all that the answers follow from: shapes, dtypes and devices of the tensors, what was
asked for, and the environment. A call of a known key costs one look at a dict; `dispatch.forget`
drops them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from sage_plugin import settings
from sage_plugin.kernels import dispatch
from sage_plugin.kernels.attention import checks, replay, run
from sage_plugin.kernels.attention.implementations import ON_GPUS
from sage_plugin.kernels.attention.mask import is_added, mask_kind, of_heads
from sage_plugin.kernels.contract import HOST, Decision, Implementation, Packed, Problem
from sage_plugin.kernels.launches import Memo
from sage_plugin.schema import CallShape, LaunchConfig


class Plan(NamedTuple):
    """What a call runs on.

    Attributes:
        decision: kernel and variant.
        kernel: its implementation.
        launch: the launch config that was given or found; `None` where nothing is tuned.
    """

    decision: Decision
    kernel: Implementation[Any]
    launch: LaunchConfig | None

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        problem: Problem,
        *,
        out_dtype: torch.dtype | None,
        return_lse: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Both steps at once, where the tensors are; on a GPU from a tape, once there is one."""
        on_gpu = self.decision.variant in ON_GPUS and q.device.type != "cpu"
        both = replay.run if on_gpu else replay.run_once
        out, lse = both(self, q, k, v, problem, out_dtype=out_dtype, return_lse=return_lse)
        return (run.as_promised(q, out) if self.decision.variant == HOST else out), lse


_plans: Memo[Plan] = Memo()


def planned(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    asked: tuple[object, ...],
    make: Callable[[], Plan],
) -> Plan:
    """The plan of a call, made where there is none yet; eager mode only.

    Args:
        q: queries.
        k: keys.
        v: values.
        asked: all else that the plan follows from.
        make: makes the plan, or raises what the caller shall see.
    """
    key = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, asked,
        settings.of_calls(),
    )  # fmt: skip
    try:
        plan = _plans.get(key)
    except TypeError:  # an argument without a hash
        return make()
    if plan is None:
        plan = make()
        if plan.decision.variant not in ON_GPUS or q.device.type != "cpu":  # TRITON_INTERPRET's say
            _plans.keep(key, plan)
    return plan


def settled(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None,
    causal: bool,
    layout: str,
    kernel: str,
    variant: str,
    launch: LaunchConfig | None,
    config_dir: str | None,
    min_seq: int = 0,
    dropout: float = 0.0,
    needs_grad: bool = False,
    special: bool = False,
) -> tuple[Plan, torch.Tensor | None]:
    """The plan of a call as `attention` takes it, and its mask as kernels take it; eager mode only.

    Raises:
        UnsupportedInputError: as `decided` and `plan_of`.
        UnknownKernelError: no kernel or variant of that name.
        ConfigError: the environment's launch config is not legal.
    """

    def make() -> Plan:
        decision, shape, _ = decided(
            q, k, v, attn_mask, causal=causal, layout=layout, kernel=kernel, variant=variant,
            min_seq=min_seq, dropout=dropout, needs_grad=needs_grad, special=special,
        )  # fmt: skip
        given = None if decision.kernel == "sdpa" else launch
        return plan_of(decision, shape, q.device, given, str(config_dir) if config_dir else None)

    form = None
    if attn_mask is not None:
        form = (attn_mask.shape, attn_mask.stride(), attn_mask.dtype, attn_mask.device)
    asked = (
        form, causal, layout, kernel, variant, launch, config_dir, min_seq, dropout, needs_grad,
        special,
    )  # fmt: skip
    plan = planned(q, k, v, asked, make)
    return plan, checks.checked_mask(attn_mask, q, k, layout)


def decided(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    packed: Packed | None = None,
    *,
    causal: bool,
    layout: str,
    kernel: str,
    variant: str,
    min_seq: int = 0,
    dropout: float = 0.0,
    needs_grad: bool = False,
    special: bool = False,
) -> tuple[Decision, CallShape, torch.Tensor | None]:
    """Where a call runs, its shape record, and its mask as kernels take it; traceable.

    Raises:
        UnsupportedInputError: tensors that do not fit together, or a named kernel that cannot take
            them.
        UnknownKernelError: no kernel or variant of that name.
    """
    if packed is None:
        checks.check_tensors(q, k, v, layout)
    checks.check_dtypes(q, k, v)
    mask = checks.checked_mask(attn_mask, q, k, layout)
    shape = run.shape_of(
        q, k, v, causal=causal, scale=1.0, layout=layout, mask_kind=mask_kind(mask), packed=packed
    )
    decision = dispatch.decide(
        shape,
        dispatch.facts_of(q.device.type, q.device.index),
        kernel=kernel,
        variant=variant,
        min_seq=min_seq if kernel == "auto" else 0,
        dropout=dropout,
        needs_grad=needs_grad,
        special=special or packed is not None or of_heads(mask),
        additive=is_added(mask),
    )
    checks.refuse_named(decision, kernel)
    return decision, shape, mask


def plan_of(
    decision: Decision,
    shape: CallShape,
    device: torch.device,
    launch: LaunchConfig | None,
    config_dir: str | None,
) -> Plan:
    """The plan of a call that is decided.

    Raises:
        UnsupportedInputError: the kernel needs a GPU, or the launch config is not legal.
        ConfigError: the environment's launch config is not legal.
    """
    checks.check_runnable(decision, device, shape, launch)
    facts = dispatch.facts_of(device.type, device.index)
    if launch is None and decision.variant != HOST:
        key = dispatch.call_key(shape, decision)
        launch = dispatch.find_launch(key, facts, config_dir=config_dir).config
    return Plan(decision, run.built(decision, facts), launch)
