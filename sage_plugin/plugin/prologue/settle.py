"""Q and K at attention: what was put off is done by one kernel, or as the model does it.

The first call of a form is compared with what the model does. Later ones hand the work on with the
attention call: a kernel that quantizes Q does it then, and all others after one more pass.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from sage_plugin.kernels.attention.call import AttentionCall
from sage_plugin.kernels.attention.executor import Executor
from sage_plugin.kernels.attention.prologue import apply
from sage_plugin.kernels.attention.prologue.one_pass import OnePass
from sage_plugin.kernels.attention.prologue.pair import QkPair
from sage_plugin.kernels.attention.prologue.record import QkStream
from sage_plugin.kernels.build_error import build_failure
from sage_plugin.kernels.notice import warn_once
from sage_plugin.plugin.context import STACK, Frame, LayerContext
from sage_plugin.plugin.prologue import operations  # noqa: F401, which fills the table of them
from sage_plugin.plugin.prologue.deferred import DeferredTensor, computed, is_waiting, shape_of
from sage_plugin.plugin.prologue.eligible import is_rounding
from sage_plugin.plugin.prologue.pending import streams_of
from sage_plugin.plugin.prologue.unfused import Unfused
from sage_plugin.plugin.request import choice_of

logger = logging.getLogger(__name__)

Prepared = list[list[QkStream]]


def settled(call: AttentionCall) -> AttentionCall:
    """An attention call with Q and K, done now or with the call where they were put off."""
    if torch.compiler.is_compiling():
        return call
    frame = STACK.frames[-1] if STACK.frames else None
    nothing_begun = frame is None or (frame.tape is None and frame.unfused is None)
    if nothing_begun and DeferredTensor not in (type(call.q), type(call.k), type(call.v)):
        return call
    if frame is not None and frame.layer is not None:
        answer = _settle(frame, frame.layer, call)
        if isinstance(answer, QkPair):
            frame.tape = None  # those who read Q or K later find it all the same
            q, k = answer.unmade(call.layout)
            return call._replace(q=q, k=k, v=computed(call.v), prologue=answer)
        if answer is not None:
            frame.layer.counts.unfused[answer] += 1
            call = call._replace(q=computed(call.q, answer), k=computed(call.k, answer))
    q, k, v = computed((call.q, call.k, call.v))
    if frame is not None and frame.tape is not None and frame.tape.is_done():
        frame.tape = None
    return call._replace(q=q, k=k, v=v)


def _settle(frame: Frame, layer: LayerContext, call: AttentionCall) -> QkPair | Unfused | None:
    """Give the tensors that wait their values; or tell why not, or what the call shall do."""
    waiting = [x for x in (call.q, call.k) if isinstance(x, DeferredTensor) and is_waiting(x)]
    if not waiting:
        of_tape = None if frame.tape is None else frame.tape.unfused
        return frame.unfused or of_tape
    options, seq = layer.state.options, 2 if call.layout == "bhsd" else 1
    shapes = [shape_of(x) for x in (call.q, call.k)]
    if any(len(shape) != 4 for shape in shapes):
        return Unfused.OPERATION
    if any(shape[seq] < options.min_seq for shape in shapes):
        return Unfused.SHORT
    if options.policy is not None and choice_of(layer, call).kernel == "sdpa":
        return Unfused.EXACT
    streams = [
        made
        for x in waiting
        if x.pending is not None and (made := streams_of(x.pending, call.layout)) is not None
    ]
    if len(streams) < len(waiting):
        return Unfused.OPERATION
    return _fuse(layer, waiting, streams, call.layout)


def _fuse(
    layer: LayerContext, waiting: list[DeferredTensor], streams: Prepared, layout: str
) -> QkPair | Unfused | None:
    """Run the kernel; at the first call of a form, compare it with what the model does."""
    verdicts = layer.state.prologues
    pair = QkPair(tuple(streams[0]), tuple(streams[1]) if len(streams) == 2 else ())
    form = (waiting[0].device, layout, pair.form())
    verdict = verdicts.get(form)
    if isinstance(verdict, Unfused):
        return verdict
    if verdict is True and pair.k:
        layer.counts.fused += 1
        return pair
    if verdict is None and _is_capturing(waiting[0]):
        return Unfused.CAPTURING
    try:
        found = _joined(streams)
    except Exception as error:
        if build_failure(error) is None:
            raise
        verdicts[form] = Unfused.BUILD_FAILED
        return Unfused.BUILD_FAILED
    if layout == "bhsd":
        found = [x.transpose(1, 2) for x in found]
    if verdict is None:
        verdicts[form] = _verdict(layer, waiting, found)
        if verdicts[form] is Unfused.DIFFERENT:
            return Unfused.DIFFERENT
    for x, value in zip(waiting, found, strict=True):
        x.settle(value)
    layer.counts.fused += 1
    return None


def _joined(streams: Prepared) -> Sequence[torch.Tensor]:
    if len(streams) == 2:
        return apply.joined_pair(*streams)
    return [apply.joined(streams[0])]


def _verdict(
    layer: LayerContext, waiting: list[DeferredTensor], found: Sequence[torch.Tensor]
) -> Unfused | bool:
    """Whether the kernel gives what the chain of the model gives, but for rounding."""
    for x, value in zip(waiting, found, strict=True):
        assert x.tape is not None, "what waits is on a tape"
        number = x.slot.number
        if not is_rounding(value, x.tape.results(frozenset((number,)))[number]):
            warn_once(
                logger, (Unfused.DIFFERENT, layer.state.component),
                "%s: norm and rotary embedding of Q and K stay the model's own: %s (said once)",
                layer.name, Unfused.DIFFERENT.value,
            )  # fmt: skip
            return Unfused.DIFFERENT
    return True


def compared(layer: LayerContext, executor: Executor, call: AttentionCall) -> AttentionCall:
    """Return a call as its executor shall run it, whose first one is compared with two passes."""
    if executor.one_pass is None and not executor.compared:
        if _is_capturing(call.v):
            layer.counts.one_pass[OnePass.CAPTURING] += 1
            return call.made()
        executor.compare(call)
    if executor.one_pass is None:
        layer.counts.in_quantization += 1
        return call
    layer.counts.one_pass[executor.one_pass] += 1
    return call.made()


def _is_capturing(x: torch.Tensor) -> bool:
    return x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
