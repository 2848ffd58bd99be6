"""What stands in for transformers' table of attention functions inside a patched attention module.

The model's configuration stays as it is, and so do the masks that the model makes by it: every call
that a kernel does not take goes to the very function that the table holds, with the arguments that
the model passed.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from sage_plugin.kernels.attention.call import AttentionCall
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin import route
from sage_plugin.plugin.context import STACK

TABLE = "ALL_ATTENTION_FUNCTIONS"
"""The name of the table in every modeling file."""

NAME = "sage_plugin"
"""What `names.register` enters in the table; models make the masks of `sdpa` for it."""

WEIGHTS = FallbackReason(Fallback.ATTENTION_WEIGHTS)
OWN_EAGER = FallbackReason(Fallback.EAGER_IS_NOT_SOFTMAX)

UNDERSTOOD = frozenset((
    # what kernels know
    "dropout", "scaling", "is_causal", "softcap", "s_aux",
    # what the mask holds already, where it is not of the flash kind
    "sliding_window",
    # what no attention function of the `sdpa` or `eager` kind takes notice of
    "position_ids", "use_cache", "output_attentions", "output_hidden_states",
    "output_router_logits", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
    "num_items_in_batch",
))  # fmt: skip
"""Arguments that keep no call from kernels, nor do others of which the function takes no notice."""

RECORDER = "transformers.utils.output_capturing"
"""The module by which models keep what hooks see of their layers, attention weights too."""

UNKNOWN_TO_SDPA = {"softcap": "soft cap", "s_aux": "sinks"}
"""Arguments that transformers' `sdpa` leaves out (5.17) or refuses (5.24). A kernel that heeds them
would make the prompt another than the tokens after it, which the host writes."""

SOFTMAX_NAMES = frozenset((
    "F", "contiguous", "dropout", "dtype", "float32", "functional", "getattr", "hasattr",
    "head_dim", "matmul", "nn", "num_key_value_groups", "repeat_kv", "size", "softmax", "tanh",
    "to", "torch", "training", "transpose", "type",
))  # fmt: skip
"""What an eager attention function names that does softmax, with a soft cap or without."""
SINK_NAMES = frozenset(("cat", "expand", "max", "reshape", "shape", "sinks", "values"))
"""What one names besides that has sinks."""

Function = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class Interfaces:
    """The table of attention functions, each of them behind our kernels."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    @property
    def _table(self) -> Any:  # noqa: ANN401
        """The table that the model's module has now."""
        return self._read()

    def get_interface(self, implementation: str, default: Function) -> Function:
        """As the table's own."""
        function = self._table.get_interface(implementation, default)
        return functools.partial(attention, function, implementation)

    def get(self, implementation: str, default: Function | None = None) -> Function | None:
        """As a dict's."""
        function = self._table.get(implementation, default)
        return None if function is None else functools.partial(attention, function, implementation)

    def __getitem__(self, implementation: str) -> Function:
        return functools.partial(attention, self._table[implementation], implementation)

    def __contains__(self, implementation: str) -> bool:
        return implementation in self._table

    def __getattr__(self, name: str) -> object:
        return getattr(self._table, name)


def attention(
    original: Function,
    implementation: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *rest: object,
    **others: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stands in for one attention function of transformers.

    Args:
        original: the function that the model would have called.
        implementation: its name in the table.
        module: the attention module.
        query: `(B, Hq, Sq, D)`; key and value `(B, Hk, Sk, D)`, not expanded.
        key: keys.
        value: values.
        attention_mask: what the model made for this implementation.
        rest: arguments that the model passed by position, besides.
        others: arguments by name.

    Returns:
        `(B, Sq, Hq, D)`, and attention weights where only the original has them.
    """

    def host() -> tuple[torch.Tensor, torch.Tensor | None]:
        return original(module, query, key, value, attention_mask, *rest, **others)

    implementation = "sdpa" if implementation == NAME else implementation
    blocked = _obstacle(original, implementation, others)
    if blocked is not None and blocked.cause is Fallback.IMPLEMENTATION:
        blocked = _untold(implementation, query, key, attention_mask, others) or blocked
    if _wants_weights(module, others):
        blocked = WEIGHTS
    blocked = route.ARGUMENTS if rest else blocked
    call = _call(implementation, module, query, key, value, attention_mask, others)
    result = route.attend(host, call, blocked)
    return result if isinstance(result, tuple) else (result.transpose(1, 2), None)


def _call(
    implementation: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    others: dict[str, Any],
) -> AttentionCall:
    """The call in the words of SDPA, as `sdpa` or `eager` attention understands it."""
    causal = others.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    # Eager attention hides keys by its mask alone.
    causal = query.shape[2] > 1 and attention_mask is None and causal and implementation != "eager"
    if causal and key.shape[2] > query.shape[2]:  # prefill into an empty static cache
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    return AttentionCall(
        query, key, value, attention_mask, others.get("dropout") or 0.0, bool(causal),
        others.get("scaling"), True, "bhsd", others.get("softcap") or 0.0, others.get("s_aux"),
    )  # fmt: skip


def _obstacle(
    original: Function, implementation: str, others: dict[str, Any]
) -> FallbackReason | None:
    """Why a call is the original's, as far as its arguments tell."""
    if implementation not in ("sdpa", "eager"):
        if others.get("cu_seq_lens_q") is not None:
            return FallbackReason(Fallback.PACKED_BY_HOST, implementation)
        return FallbackReason(Fallback.IMPLEMENTATION, implementation)
    for name, given in others.items():
        if given is not None and name not in UNDERSTOOD and _heeds(original, name):
            return FallbackReason(Fallback.MODEL_ARGUMENT, name)
    if implementation == "sdpa":
        for name, meaning in UNKNOWN_TO_SDPA.items():
            if others.get(name) is not None:
                return FallbackReason(Fallback.UNKNOWN_TO_SDPA, meaning)
    sinks = others.get("s_aux")
    if implementation == "eager" and not _is_softmax(original, sinks is not None):
        return OWN_EAGER
    return None


def _untold(
    implementation: str,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    others: dict[str, Any],
) -> FallbackReason | None:
    """Why tensors and mask do not tell what attention of the flash kind computes, `None` if so.

    Positions are looked at for listeners alone, since that waits for the device; what they have to
    be to mean packed sequences is transformers' `_is_packed_sequence`.
    """
    frame = STACK.frames[-1] if STACK.frames else None
    if torch.compiler.is_compiling() or frame is None or frame.layer is None:
        return None
    window = others.get("sliding_window")
    if isinstance(window, int) and window < key.shape[2]:
        return FallbackReason(Fallback.WINDOW_BY_HOST, (window, implementation))
    positions = others.get("position_ids")
    if (
        not frame.layer.state.listeners
        or attention_mask is not None
        or query.shape[0] != 1
        or not isinstance(positions, torch.Tensor)
        or positions.dim() > 2
    ):
        return None
    steps = positions.flatten().diff()
    packed = steps.numel() > 0 and bool((steps != 1).any())
    return FallbackReason(Fallback.PACKED_BY_HOST, implementation) if packed else None


def _wants_weights(module: torch.nn.Module, others: dict[str, Any]) -> bool:
    """Whether attention weights are asked for: of the call, of the module, or by configuration.

    A model that records them with hooks passes nothing on.
    """
    return bool(
        others.get("output_attentions")
        or (STACK.frames and STACK.frames[-1].weights)
        or getattr(getattr(module, "config", None), "output_attentions", False)
        or _records_weights()
    )


def _records_weights() -> bool:
    """Whether transformers' recorder is on for attention weights of any kind."""
    collector: Any = getattr(sys.modules.get(RECORDER), "_active_collector", None)
    if collector is None:
        return False
    asked = collector.global_var if torch.compiler.is_compiling() else collector.get()
    return asked is not None and any("attentions" in kind for kind in asked)


def _heeds(function: Function, name: str) -> bool:
    """Whether an attention function takes notice of an argument; it may where nobody can tell."""
    if function not in _heeded:
        _heeded[function] = _heeded_by(getattr(function, "__code__", None))
    heeded = _heeded[function]
    return heeded is None or name in heeded


vars(_heeds)["_dynamo_marked_constant"] = True
_heeded: dict[Function, frozenset[str] | None] = {}


def _heeded_by(code: types.CodeType | None) -> frozenset[str] | None:
    """Parameters, and what code asks its other arguments for; `None` if it passes these on."""
    if code is None or _passes_on(code):
        return None
    return frozenset((*code.co_varnames, *(c for c in code.co_consts if isinstance(c, str))))


def _passes_on(code: types.CodeType) -> bool:
    """Whether code does more with its `**kwargs` than to ask for some of them."""
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return False
    named = code.co_argcount + code.co_kwonlyargcount
    rest = code.co_varnames[named + bool(code.co_flags & inspect.CO_VARARGS)]
    for step, after in itertools.pairwise(dis.get_instructions(code)):
        loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if rest in loaded and not (loaded[-1] == rest and after.argval == "get"):
            return True
    return False


def _is_softmax(function: Function, sinks: bool) -> bool:
    """Whether an eager attention function does nothing but what kernels do, by what it names."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    names = set(code.co_names)
    return names <= SOFTMAX_NAMES | (SINK_NAMES if sinks else frozenset())
