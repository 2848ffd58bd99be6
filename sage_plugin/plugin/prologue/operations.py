"""The operations on a tensor that was put off which are written down instead of computed.

They are those by which processors bring Q and K into attention's shape: parting heads, exchanging
heads and tokens, slices of tokens, tokens in the place of others, concatenation, idle casts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sage_plugin.plugin.prologue import pending as views
from sage_plugin.plugin.prologue.deferred import HANDLERS, DeferredTensor, Function, shown
from sage_plugin.plugin.prologue.pending import Pending


def _state(x: object) -> Pending | None:
    """What a tensor will be; a plain one is all of itself."""
    if isinstance(x, DeferredTensor):
        return x.pending
    if type(x) is not torch.Tensor or x.dim() not in (3, 4):
        return None
    return None if x.requires_grad and torch.is_grad_enabled() else Pending.whole(x)


def _on_view(function: Function, x: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """`transpose`, `unflatten`, `view`, and slices of tokens."""
    if kwargs or not isinstance(x, DeferredTensor) or x.pending is None:
        return NotImplemented
    view = VIEWS[function]
    if view in (views.viewed, views.permuted):
        made = view(x.pending, args[0] if isinstance(args[0], tuple | list) else args)
    else:
        made = view(x.pending, *args)
    if made is None or x.tape is None:
        return NotImplemented
    return x.tape.put_off(function, (x, *args), {}, made, x.slot)


def _on_change(function: Function, x: object, index: object, value: object) -> Any:  # noqa: ANN401
    """`x[..., tokens, :] = value`; slices that were taken before and live are views of `x`."""
    if not (isinstance(x, DeferredTensor) and isinstance(value, DeferredTensor)):
        return NotImplemented
    if x.pending is None or value.pending is None or value.tape is not x.tape or x.tape is None:
        return NotImplemented
    made = views.replaced(x.pending, index, value.pending)
    if made is None or x.tape.has_views_of(x.slot):
        return NotImplemented
    x.tape.put_off_change(function, (x, index, value))
    x.pending = made
    return None


def _on_cat(function: Function, tensors: Sequence[object], dim: int = 0, **kwargs: object) -> Any:  # noqa: ANN401
    tensors = shown(list(tensors))
    first = next((x for x in tensors if isinstance(x, DeferredTensor)), None)
    if first is None:
        return NotImplemented
    states = [state for x in tensors if (state := _state(x)) is not None]
    tapes = {x.tape for x in tensors if isinstance(x, DeferredTensor)}
    same = {(x.dtype, x.device) for x in tensors if isinstance(x, torch.Tensor)}
    if kwargs or len(states) < len(tensors) or len(tapes) > 1 or len(same) > 1:
        return NotImplemented
    made = views.concatenated(states, dim)
    if made is None or first.tape is None:
        return NotImplemented
    return first.tape.put_off(function, (tensors, dim), {}, made)


def _on_cast(function: Function, x: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """A cast to what a tensor is already gives the tensor itself; one like it needs no values."""
    if not isinstance(x, DeferredTensor):
        like = args[0] if len(args) == 1 and not kwargs else None
        if type(x) is torch.Tensor and isinstance(like, DeferredTensor):
            return x.to(device=like.device, dtype=like.dtype)
        return NotImplemented
    targets = (*args, *kwargs.values())
    if not kwargs.keys() <= {"dtype", "device"}:
        return NotImplemented
    kinds = {torch.dtype: x.dtype, torch.device: x.device}
    same = all(
        (to.dtype, to.device) == (x.dtype, x.device)
        if isinstance(to, torch.Tensor)
        else kinds.get(type(to)) == to
        for to in targets
    )
    return x if same else NotImplemented


VIEWS: dict[Function, Function] = {
    torch.Tensor.transpose: views.transposed,
    torch.transpose: views.transposed,
    torch.Tensor.unflatten: views.unflattened,
    torch.unflatten: views.unflattened,
    torch.Tensor.permute: views.permuted,
    torch.Tensor.view: views.viewed,
    torch.Tensor.reshape: views.viewed,
    torch.Tensor.__getitem__: views.sliced,
}
HANDLERS.update(dict.fromkeys(VIEWS, _on_view))
HANDLERS.update(dict.fromkeys((torch.cat, torch.concat), _on_cat))
HANDLERS.update(dict.fromkeys((torch.Tensor.to, torch.Tensor.type_as), _on_cast))
HANDLERS[torch.Tensor.__setitem__] = _on_change
