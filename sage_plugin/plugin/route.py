"""Where an attention call of a patched layer goes: to a kernel, or to the host with a reason.

Two entrances have the signatures of what they stand in for, torch's SDPA and diffusers'
`dispatch_attention_fn`; that of transformers is in `hosts/transformers_dispatch.py`. The host's own
function gets exactly the arguments that the model passed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention.api import run_op
from sage_plugin.kernels.attention.call import (
    AttentionCall,
    KernelRequest,
    is_plain,
)
from sage_plugin.kernels.attention.executor import Executor, decide, known, resolve
from sage_plugin.kernels.build_error import build_failure
from sage_plugin.kernels.contract import HOST, Decision
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.kernels.notice import warn_once
from sage_plugin.kernels.surroundings import can_bypass_dispatcher, wants_gradient
from sage_plugin.plugin.context import STACK, CallEvent, Frame, LayerContext, PatchState
from sage_plugin.plugin.hosts import parallel
from sage_plugin.plugin.obstacle import SHAPE, fits, obstacle
from sage_plugin.plugin.prologue.settle import compared, settled
from sage_plugin.plugin.request import Choice, choice_of

logger = logging.getLogger(__name__)

T = TypeVar("T")
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

NOT_FINITE = FallbackReason(Fallback.NOT_FINITE)
BAD_INPUT = FallbackReason(Fallback.INPUT_NOT_FINITE)
PARALLEL = FallbackReason(Fallback.PARALLEL)
GRADIENT = FallbackReason(Fallback.GRADIENT)
ARGUMENTS = FallbackReason(Fallback.ARGUMENTS)
BY_POLICY = "policy"
"""Where a launch config with fields of a rule came from."""


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stands in for `F.scaled_dot_product_attention` inside a patched processor."""
    call = settled(
        AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, "bhsd")
    )

    def host() -> torch.Tensor:
        made = call.made()
        return torch.nn.functional.scaled_dot_product_attention(
            made.q, made.k, made.v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip

    return attend(host, call, None)


def dispatch_instead_of(
    read: Callable[[], Callable[..., torch.Tensor]],
) -> Callable[..., torch.Tensor]:
    """What stands in for diffusers' `dispatch_attention_fn`, which `read` gets from its module."""

    def dispatch_attention_fn(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        attention_kwargs: dict[str, object] | None = None,
        *,
        backend: object = None,
        parallel_config: object = None,
        **unknown: object,
    ) -> torch.Tensor:
        original = read()
        call = settled(
            AttentionCall(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, "bshd"
            )
        )

        def host() -> torch.Tensor:
            made = call.made()
            return original(
                made.q, made.k, made.v, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                attention_kwargs, backend=backend, parallel_config=parallel_config, **unknown,
            )  # fmt: skip

        blocked = ARGUMENTS if attention_kwargs or unknown else None
        if parallel_config is not None:
            call = call.made()
            return attend_in_parallel(host, call, blocked, original, parallel_config)
        return attend(host, call, blocked)

    return dispatch_attention_fn


def attend(
    host: Callable[[], T], call: AttentionCall, blocked: FallbackReason | None
) -> torch.Tensor | T:
    """One attention call of a patched layer: what a kernel gives, or what the host gives.

    Args:
        host: the host's own attention, with the arguments that the model passed.
        call: those arguments.
        blocked: why no kernel takes it, if that is known already.

    Returns:
        The output, with its LSE `(B, H, Sq)` where the call wants it.
    """
    frame = STACK.frames[-1] if STACK.frames else None
    if frame is None or frame.layer is None:
        return host()
    layer, eager = frame.layer, not torch.compiler.is_compiling()
    if eager and blocked is None and (executor := _known(layer, call)) is not None:
        frame.index += 1
        result = _run_resolved(layer, call, executor, watched=False)
        return host() if result is None else cast("torch.Tensor", result)
    if call.prologue is not None and _is_read(layer.state, call):
        call = call.made()
    if eager and layer.broken is not None:
        blocked = layer.broken
    if layer.state.options.policy is not None and not eager:
        return _later(host, layer, call, blocked)
    choice = choice_of(layer, call)
    resolved, mask = _resolve(layer, call, blocked, choice)
    decision = _decision_of(resolved)
    if eager:
        _tell(frame, layer, call, decision, blocked)
        _note_rule(layer, choice)
    if decision.reason is not None:
        _give_way(layer, decision.reason)
        return host()
    if decision.kernel == "sdpa":
        if eager:
            layer.counts.calls[decision.label] += 1
        return host()
    call, kind = call._replace(attn_mask=mask), call.q.device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):  # our op is not on autocast's list, as SDPA is
            result = _run(layer, call.cast(torch.get_autocast_dtype(kind)), choice)
    elif isinstance(resolved, Executor):
        result = _run_resolved(layer, call, resolved, choice.launch)
    else:
        result = run_op(decision, call, mask, None, layer.state.options.config_dir)
    # Only a `T` of two tensors asks for the LSE.
    return host() if result is None else cast("torch.Tensor", result)


def attend_in_parallel(
    host: Callable[[], torch.Tensor],
    call: AttentionCall,
    blocked: FallbackReason | None,
    original: Callable[..., torch.Tensor],
    config: Any,  # noqa: ANN401
) -> torch.Tensor:
    """One attention call whose sequence lies on several devices, as diffusers spreads it.

    What a kernel takes goes through diffusers' own exchange (`parallel.py`), each part of it a call
    of its own.

    Args:
        host: the host's own attention, with the arguments that the model passed.
        call: those arguments; Q, K and V are this device's part of the sequence.
        blocked: why no kernel takes it, if that is known already.
        original: diffusers' `dispatch_attention_fn`.
        config: its `parallel_config`.
    """
    frame = STACK.frames[-1] if STACK.frames else None
    if frame is None or frame.layer is None:
        return host()
    spread, degrees = parallel.exchange_of(original), parallel.degrees_of(config)
    if spread is None or degrees is None or call.is_causal or call.enable_gqa:
        blocked = blocked or PARALLEL
    if frame.layer.state.options.policy is not None and torch.compiler.is_compiling():
        blocked = blocked or PARALLEL
    if blocked is None and wants_gradient(call.q, call.k, call.v):
        blocked = GRADIENT  # autograd does not see inside of the exchange
    if blocked is None and degrees is not None:
        seen = parallel.as_exchanged(call, degrees)
        choice = choice_of(frame.layer, seen)
        decision = _decision_of(_resolve(frame.layer, seen, None, choice)[0])
        if decision.kernel != "sdpa":
            return parallel.attention(spread, attend, call, config)
        blocked = decision.reason
    return attend(host, call, blocked)


def _is_sound(
    layer: LayerContext, call: AttentionCall, decision: Decision, result: torch.Tensor
) -> bool:
    """Whether an output is finite; if not, say where it came from, and keep a kernel off the layer.

    Inputs that are not finite are no fault of the kernel, which stays.
    """
    if torch.isfinite(result).all():
        return True
    place = f"{layer.name}, forward {layer.state.forwards.count}, kernel {decision.label!r}"
    mask = call.attn_mask
    if all(torch.isfinite(x).all() for x in (call.q, call.k, call.v)) and (
        mask is None or not mask.isnan().any()
    ):
        layer.broken = NOT_FINITE
        layer.counts.fallbacks[NOT_FINITE] += 1
        layer.state.warned.add(NOT_FINITE)
        logger.warning(
            "%s: finite inputs gave an output with NaN or infinity; the host's attention takes "
            "this call and all further ones of the layer", place,
        )  # fmt: skip
        return False
    if BAD_INPUT not in layer.state.warned:
        layer.state.warned.add(BAD_INPUT)
        logger.warning("%s: Q, K, V or the mask has NaN or infinity already (said once)", place)
    return True


def _later(
    host: Callable[[], T], layer: LayerContext, call: AttentionCall, blocked: FallbackReason | None
) -> torch.Tensor | T:
    """A call in a graph whose kernel a policy chooses anew each time that the graph runs."""
    mask = call.host_mask() if fits(call) else SHAPE
    plain_call = blocked is None and is_plain(call.q) and is_plain(call.k) and is_plain(call.v)
    beyond = call.softcap > 0.0 or call.sinks is not None or call.return_lse
    needs_grad = wants_gradient(call.q, call.k, call.v, call.attn_mask)
    if not plain_call or beyond or needs_grad or isinstance(mask, FallbackReason):
        return host()
    kind, q, k, v = call.q.device.type, call.q, call.k, call.v
    if torch.is_autocast_enabled(kind):
        cast_call = call.cast(torch.get_autocast_dtype(kind))
        q, k, v = cast_call.q, cast_call.k, cast_call.v
    with torch.autocast(kind, enabled=False):
        out: torch.Tensor = torch.ops.sage_plugin.routed(
            q, k, v, mask, layer.handle, call.dropout_p, call.is_causal, call.scale,
            call.enable_gqa, call.layout,
        )  # fmt: skip
    return out


def _request(layer: LayerContext, choice: Choice, grouped: bool) -> KernelRequest:
    """Return what shall compute a call of a layer."""
    changes = tuple(sorted(choice.launch.items())) if choice.launch else ()
    options = layer.state.options
    if options.policy is None:
        return options.requests[1 if grouped else 0]
    return KernelRequest(choice.kernel, choice.variant, None, options.config_dir, 0, changes)


def _resolve(
    layer: LayerContext, call: AttentionCall, blocked: FallbackReason | None, choice: Choice
) -> tuple[Executor | FallbackReason | Decision, torch.Tensor | None]:
    """Return what runs a call, with its mask as kernels take it; a decision while tracing.

    A known call in eager mode is one look into the memo that `attention` has.
    """
    if choice.kernel == "sdpa" and choice.reason is None:
        return Decision("sdpa", HOST), None
    blocked = blocked or choice.reason or obstacle(layer.state, call)
    if blocked is not None:
        return blocked, None
    mask = call.host_mask()
    if isinstance(mask, FallbackReason):
        return mask, None
    call = call._replace(attn_mask=mask)
    request = _request(layer, choice, call.enable_gqa)
    if torch.compiler.is_compiling():
        return decide(call, request)[0], mask
    resolved = resolve(call, request)
    unbuilt = layer.state.unbuilt
    if unbuilt and isinstance(resolved, Executor) and resolved.key is not None:
        return unbuilt.get(resolved.key.discrete(), resolved), mask
    return resolved, mask


def _decision_of(resolved: Executor | FallbackReason | Decision) -> Decision:
    if isinstance(resolved, FallbackReason):
        return Decision("sdpa", HOST, resolved)
    return resolved.decision if isinstance(resolved, Executor) else resolved


def _run(layer: LayerContext, call: AttentionCall, choice: Choice) -> Result | None:
    """Run a call whose dtype autocast changed; `None` if the host's attention shall."""
    resolved, mask = _resolve(layer, call, None, choice)
    if isinstance(resolved, FallbackReason):
        _give_way(layer, resolved)
        return None
    if isinstance(resolved, Executor):
        return _run_resolved(layer, call, resolved, choice.launch)
    return run_op(resolved, call, mask, None, layer.state.options.config_dir)


def _known(layer: LayerContext, call: AttentionCall) -> Executor | None:
    """Return what runs a call of a known key where nothing but the key decides; eager only.

    Such a call costs one look into the memo that `attention` has. Its key was kept after `_resolve`
    had let a call of that key through.
    """
    state = layer.state
    options = state.options
    if (
        options.policy is not None
        or options.check_finite
        or state.disabled
        or state.unbuilt
        or state.listeners
        or layer.broken is not None
        or call.attn_mask is not None
        or not can_bypass_dispatcher(*call.tensors())
        or torch.is_autocast_enabled(call.q.device.type)
    ):
        return None
    answer = known(call, options.requests[1 if call.enable_gqa else 0])
    return answer if isinstance(answer, Executor) and answer.decision.kernel != "sdpa" else None


def _run_resolved(
    layer: LayerContext,
    call: AttentionCall,
    executor: Executor,
    changes: Mapping[str, Any] | None = None,
    *,
    watched: bool = True,
) -> Result | None:
    """Run the kernel and count; `None` if the host's attention shall take the call instead.

    Args:
        layer: the layer.
        call: its call.
        executor: what runs it.
        changes: fields of the launch config that a rule changes.
        watched: whether something may watch what is done with these tensors.
    """
    try:
        if call.prologue is not None:
            call = compared(layer, executor, call)
        if not watched or can_bypass_dispatcher(*call.tensors()):
            out, lse = executor.run(call)
            result = out if lse is None else (out, lse)
        else:
            call = call.made()
            launch = executor.launch if changes else None
            result = run_op(
                executor.decision, call, call.attn_mask, launch, layer.state.options.config_dir
            )
    except Exception as error:
        reason = build_failure(error)
        if reason is None or executor.key is None or layer.state.options.strict:
            raise
        layer.state.unbuilt[executor.key.discrete()] = reason
        _give_way(layer, reason)
        return None
    if layer.state.options.check_finite:
        output = result[0] if isinstance(result, tuple) else result
        if not _is_sound(layer, call, executor.decision, output):
            return None
    layer.counts.calls[executor.decision.label] += 1
    found = executor.found
    if executor.key is not None:
        layer.counts.config_sources[BY_POLICY if found is None else found.mark] += 1
    if found is not None and found.saved_ms is not None:
        layer.counts.saved_ms += found.saved_ms
        layer.counts.timed_calls += 1
    return result


def _is_read(state: PatchState, call: AttentionCall) -> bool:
    """Whether more than a kernel reads Q and K."""
    looked_at = bool(state.listeners) or state.options.check_finite
    return looked_at or torch.is_autocast_enabled(call.v.device.type)


def _tell(
    frame: Frame,
    layer: LayerContext,
    call: AttentionCall,
    decision: Decision,
    blocked: FallbackReason | None,
) -> None:
    """Tell the listeners of a call before it runs."""
    frame.index += 1
    if not layer.state.listeners:
        return
    event = CallEvent(
        layer.state.component, layer.name, frame.index - 1, call.q, call.k, call.v, call.attn_mask,
        call.is_causal, call.scale, call.layout, decision,
        blocked,
    )  # fmt: skip
    for listener in layer.state.listeners:
        listener(event)


def _note_rule(layer: LayerContext, choice: Choice) -> None:
    """Count the rule of the policy that chose, and the step."""
    if choice.rule:
        layer.counts.rules[choice.rule] += 1
        if choice.step is not None:
            layer.counts.rule_steps.setdefault(choice.rule, set()).add(choice.step)


def _give_way(layer: LayerContext, reason: FallbackReason) -> None:
    """Count a call that stays with the model's own attention in eager mode, and say why once.

    One line a reason in each process, and one a layer among the log's details.

    Raises:
        UnsupportedInputError: strict mode, and nobody asked for it.
    """
    eager = not torch.compiler.is_compiling()
    # An export that is not strict runs this as it is, and keeps what it takes here for good.
    told = eager or (torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling())
    first = told and layer.counts.fallbacks[reason] == 0
    if eager:
        layer.counts.fallbacks[reason] += 1
    if first and not reason.cause.by_policy:
        warn_once(logger, reason, "%s (said once)", _complaint(layer, reason))
    if layer.state.options.strict and not reason.cause.asked_for:
        raise UnsupportedInputError(_complaint(layer, reason))


def _complaint(layer: LayerContext, reason: FallbackReason) -> str:
    options = layer.state.options
    kernel = f"kernel {options.kernel!r}" if options.policy is None else "the policy's kernel"
    return f"{layer.name}: {kernel} falls back to the model's own attention: {reason}"
