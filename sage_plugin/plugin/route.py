"""Where an attention call of a patched layer goes: to a kernel, or to the host with a reason.

Two entrances have the signatures of what they stand in for, torch's SDPA and diffusers'
`dispatch_attention_fn`; that of transformers is in `hosts/transformers_dispatch.py`. The host's own
function gets exactly the arguments that the model passed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch.utils._device import DeviceContext

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention import dispatch
from sage_plugin.kernels.attention.api import run_decided
from sage_plugin.kernels.attention.mask import is_added, of_heads
from sage_plugin.kernels.attention.validate import wants_gradient
from sage_plugin.kernels.build_error import build_failure
from sage_plugin.kernels.contract import HOST, Decision
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin.call import SUBCLASS, Call, plain
from sage_plugin.plugin.context import STACK, CallEvent, Frame, LayerContext, PatchState
from sage_plugin.plugin.hosts import parallel
from sage_plugin.plugin.request import Choice, choice_of
from sage_plugin.schema import DeviceFacts, LaunchConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

DISABLED = FallbackReason(Fallback.DISABLED)
FUNCTION_MODE = FallbackReason(Fallback.FUNCTION_MODE)
SHAPE = FallbackReason(Fallback.SHAPE)
CAUSAL = FallbackReason(Fallback.CAUSAL_ALIGNMENT)
NOT_FINITE = FallbackReason(Fallback.NOT_FINITE)
BAD_INPUT = FallbackReason(Fallback.INPUT_NOT_FINITE)
PARALLEL = FallbackReason(Fallback.PARALLEL)
ARGUMENTS = FallbackReason(Fallback.ARGUMENTS)
BY_POLICY = "policy"
"""Where a launch config with fields of a rule came from."""
DEVICES = ("cpu", "cuda")


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

    def host() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
            scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip

    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, "bhsd")
    return attend(host, call, None)


@functools.cache
def dispatch_instead_of(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What stands in for diffusers' `dispatch_attention_fn`; one object for one original."""

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
        def host() -> torch.Tensor:
            return original(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                attention_kwargs, backend=backend, parallel_config=parallel_config, **unknown,
            )  # fmt: skip

        blocked = ARGUMENTS if attention_kwargs or unknown else None
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, "bshd")
        if parallel_config is not None:
            return attend_in_parallel(host, call, blocked, original, parallel_config)
        return attend(host, call, blocked)

    return dispatch_attention_fn


def attend(host: Callable[[], T], call: Call, blocked: FallbackReason | None) -> torch.Tensor | T:
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
    if eager and layer.broken is not None:
        blocked = layer.broken
    if layer.state.options.policy is not None and not eager:
        return _later(host, layer, call, blocked)
    choice = choice_of(layer, call)
    decision, mask = _decide(layer.state, call, blocked or choice.reason, choice)
    if eager:
        _note(frame, layer, call, decision)
        _note_rule(layer, choice)
    reason = decision.reason
    if reason is not None and layer.state.options.strict and not reason.cause.asked_for:
        raise UnsupportedInputError(_complaint(layer, reason))
    if decision.kernel == "sdpa":
        return host()
    result, kind = None, call.q.device.type
    if torch.is_autocast_enabled(kind):
        with torch.autocast(kind, enabled=False):  # our op is not on autocast's list, as SDPA is
            cast_call = call.cast(torch.get_autocast_dtype(kind))
            result = _run(layer, cast_call, mask, decision, choice)
    else:
        result = _run(layer, call, mask, decision, choice)
    if result is not None and eager and layer.state.options.check_finite:
        output = result[0] if isinstance(result, tuple) else result
        result = result if _is_sound(layer, call, decision, output) else None
    # Only a `T` of two tensors asks for the LSE.
    return host() if result is None else cast("torch.Tensor", result)


def attend_in_parallel(
    host: Callable[[], torch.Tensor],
    call: Call,
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
        blocked = dispatch.GRADIENT  # autograd does not see inside of the exchange
    if blocked is None and degrees is not None:
        seen = parallel.as_exchanged(call, degrees)
        choice = choice_of(frame.layer, seen)
        decision, _ = _decide(frame.layer.state, seen, choice.reason, choice)
        if decision.kernel != "sdpa":
            return parallel.attention(spread, attend, call, config)
        blocked = decision.reason
    return attend(host, call, blocked)


def _is_sound(layer: LayerContext, call: Call, decision: Decision, result: torch.Tensor) -> bool:
    """Whether an output is finite; if not, say where it came from, and keep a kernel off the layer.

    Inputs that are not finite are no fault of the kernel, which stays.
    """
    if torch.isfinite(result).all():
        return True
    place = f"{layer.name}, forward {layer.state.forwards}, kernel {decision.label!r}"
    mask = call.attn_mask
    if all(torch.isfinite(x).all() for x in (call.q, call.k, call.v)) and (
        mask is None or not mask.isnan().any()
    ):
        layer.broken = NOT_FINITE
        layer.calls[decision.label] -= 1
        layer.fallbacks[NOT_FINITE] += 1
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
    host: Callable[[], T], layer: LayerContext, call: Call, blocked: FallbackReason | None
) -> torch.Tensor | T:
    """A call in a graph whose kernel a policy chooses anew each time that the graph runs."""
    mask = call.mask() if _fits(call) else SHAPE
    plain_call = blocked is None and plain(call.q) and plain(call.k) and plain(call.v)
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


def _run(
    layer: LayerContext,
    call: Call,
    mask: torch.Tensor | None,
    decision: Decision,
    choice: Choice,
) -> Result | None:
    """Run the kernel; `None` where it cannot be built, which the layer remembers of such calls."""
    if torch.compiler.is_compiling() or decision.variant == HOST:
        return _launch(layer, call, mask, decision)
    key = dispatch.call_key(call.shape(mask), decision)
    reason = layer.state.unbuilt.get(key.discrete())
    if reason is None:
        config_dir = layer.state.options.config_dir
        found = dispatch.find_launch(key, _facts(call.q), config_dir=config_dir)
        config = found.config.replaced(**choice.launch) if choice.launch else None
        if config is not None:
            illegal = dispatch.illegal_reason(config, key, _facts(call.q))
            reason = None if illegal is None else FallbackReason(Fallback.ILLEGAL_CONFIG, illegal)
        if reason is not None and layer.state.options.strict:
            raise UnsupportedInputError(_complaint(layer, reason))
    if reason is None:
        try:
            result = _launch(layer, call, mask, decision, config)
        except Exception as error:
            reason = build_failure(error)
            if reason is None or layer.state.options.strict:
                raise
            layer.state.unbuilt[key.discrete()] = reason
        else:
            layer.config_sources[found.source if config is None else BY_POLICY] += 1
            if found.saved_ms is not None and config is None:
                layer.saved_ms += found.saved_ms
                layer.timed_calls += 1
            return result
    layer.calls[decision.label] -= 1
    _give_way(layer, reason)
    return None


def _launch(
    layer: LayerContext,
    call: Call,
    mask: torch.Tensor | None,
    decision: Decision,
    launch: LaunchConfig | None = None,
) -> Result:
    return run_decided(
        decision, call.q, call.k, call.v, is_causal=call.is_causal, scale=call.factor(),
        layout=call.layout, return_lse=call.return_lse, launch=launch,
        config_dir=layer.state.options.config_dir, mask=mask, softcap=call.softcap,
        sinks=call.sinks,
    )  # fmt: skip


def _decide(
    state: PatchState, call: Call, blocked: FallbackReason | None, choice: Choice
) -> tuple[Decision, torch.Tensor | None]:
    """Where a call runs, and its mask as kernels take it."""
    if choice.kernel == "sdpa" and choice.reason is None:
        return Decision("sdpa", HOST), None
    reason = blocked or _obstacle(state, call)
    if reason is not None:
        return Decision("sdpa", HOST, reason), None
    mask = call.mask()
    if isinstance(mask, FallbackReason):
        return Decision("sdpa", HOST, mask), None
    decision = dispatch.decide(
        call.shape(mask),
        _facts(call.q),
        kernel=choice.kernel,
        variant=choice.variant,
        dropout=call.dropout_p,
        needs_grad=wants_gradient(call.q, call.k, call.v, call.attn_mask, call.sinks),
        special=of_heads(mask) or call.softcap > 0.0 or call.sinks is not None,
        additive=is_added(mask),
    )
    return decision, mask


def _obstacle(state: PatchState, call: Call) -> FallbackReason | None:
    """Why a call cannot or shall not leave the host, as far as no kernel needs to be known."""
    q, k, v, options = call.q, call.k, call.v, state.options
    if state.disabled:
        return DISABLED
    if not torch.compiler.is_compiling() and _watched():
        return FUNCTION_MODE
    if not (plain(q) and plain(k) and plain(v)):
        return SUBCLASS
    if q.device.type not in DEVICES:
        return FallbackReason(Fallback.DEVICE, q.device.type)
    if not _fits(call):
        return SHAPE
    seq = 2 if call.layout == "bhsd" else 1
    if not (_surely(q.shape[seq] >= options.min_seq) and _surely(k.shape[seq] >= options.min_seq)):
        return FallbackReason(Fallback.SHORTER_THAN_PATCH_MIN_SEQ, options.min_seq)
    return CAUSAL if call.is_causal and not _surely(q.shape[seq] == k.shape[seq]) else None


def _watched() -> bool:
    modes = torch.overrides._get_current_function_mode_stack()
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def _fits(call: Call) -> bool:
    """Whether SDPA would neither broadcast nor refuse these shapes."""
    q, k, v = call.q, call.k, call.v
    if not (q.dim() == k.dim() == v.dim() == 4):
        return False
    heads, seq = (1, 2) if call.layout == "bhsd" else (2, 1)
    grouped = call.enable_gqa and k.shape[heads] > 0 and q.shape[heads] % k.shape[heads] == 0
    return (
        _surely(q.shape[0] == k.shape[0])
        and _surely(k.shape[0] == v.shape[0])
        and (_surely(q.shape[heads] == k.shape[heads]) or grouped)
        and _surely(k.shape[heads] == v.shape[heads])
        and _surely(k.shape[seq] == v.shape[seq])
        and _surely(q.shape[3] == k.shape[3])
        and q.device == k.device == v.device
        and (call.sinks is None or call.sinks.shape == (q.shape[heads],))
    )


def _surely(condition: bool) -> bool:
    """Whether sizes compare so; no, where a graph cannot tell, since they follow from data."""
    if not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # which imports sympy

    return guard_or_false(condition)


def _note(frame: Frame, layer: LayerContext, call: Call, decision: Decision) -> None:
    """Tell the listeners, count, and warn of a reason when it is met first."""
    event = CallEvent(
        layer.state.component, layer.name, frame.index, call.q, call.k, call.v, call.attn_mask,
        call.is_causal, call.scale, call.layout, decision,
    )  # fmt: skip
    frame.index += 1
    for listener in layer.state.listeners:
        listener(event)
    if decision.reason is None:
        layer.calls[decision.label] += 1
        return
    _give_way(layer, decision.reason)


def _note_rule(layer: LayerContext, choice: Choice) -> None:
    """Count the rule of the policy that chose, and the step."""
    if choice.rule:
        layer.rules[choice.rule] += 1
        if choice.step is not None:
            layer.rule_steps.setdefault(choice.rule, set()).add(choice.step)


def _give_way(layer: LayerContext, reason: FallbackReason) -> None:
    """Count a call that goes to the host's attention, and say why once."""
    layer.fallbacks[reason] += 1
    if reason not in layer.state.warned and not reason.cause.by_policy:
        layer.state.warned.add(reason)
        logger.warning("%s (said once)", _complaint(layer, reason))


def _complaint(layer: LayerContext, reason: FallbackReason) -> str:
    options = layer.state.options
    kernel = options.kernel if options.policy is None else "of the policy"
    return f"{layer.name}: kernel {kernel!r} gives way to the host's attention: {reason}"


def _facts(tensor: torch.Tensor) -> DeviceFacts:
    return dispatch.facts_of(tensor.device.type, tensor.device.index)
