"""Rotary embeddings as processors call them: what of each goes into the kernel's tables.

A function is known by its name and its parameters. What else it has is checked by its results, at
the first call of each shape (`settle.py`).
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sage_plugin.kernels.attention.prologue.record import Rope
from sage_plugin.plugin.context import STACK, Frame, LayerContext
from sage_plugin.plugin.prologue.deferred import Tape, computed, is_waiting, shown
from sage_plugin.plugin.prologue.eligible import obstacle
from sage_plugin.plugin.prologue.pending import Pending, turned
from sage_plugin.plugin.prologue.unfused import Unfused

ROTARY = frozenset(
    {
        "apply_rotary_emb",
        "apply_rotary_emb_qwen",
        "apply_interleaved_rotary_emb",
        "apply_split_rotary_emb",
    }
)
"""Names of the functions."""

Arguments = Mapping[str, Any]
Found = tuple[Rope, int]
"""Tables, and the dimension of the tokens."""
Form = Callable[[Arguments, Pending], Found | None]
"""Reads them from the arguments of a call; `None` where it is not known what they mean."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def instead_of(read: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What stands in for a rotary embedding, which `read` gets from where it is."""

    def rotary(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        original = read()
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        return _put_off(original, args, kwargs)

    return rotary


def _put_off(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    frame = STACK.frames[-1] if STACK.frames else None
    if frame is None or frame.layer is None or not args:
        return original(*computed(args), **computed(kwargs))
    x = args[0]
    if not is_waiting(x):
        return _begun(frame, frame.layer, original, shown(args), shown(kwargs))
    made = _made(original, args, kwargs, x.pending)
    if made is None:
        return original(*computed(args), **computed(kwargs))
    return x.tape.put_off(original, args, kwargs, made)


def _begun(
    frame: Frame,
    layer: LayerContext,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # noqa: ANN401
    """Put the embedding of a tensor off whose norm was not, such as one that has none."""
    x = args[0]
    if not isinstance(x, torch.Tensor) or x.dim() not in (3, 4):
        return original(*computed(args), **computed(kwargs))
    reason, made = obstacle(layer, x), None
    if reason is None:
        made = _made(original, args, kwargs, Pending.whole(x))
    if made is None:
        frame.unfused = reason or Unfused.OPERATION
        return original(*computed(args), **computed(kwargs))
    if frame.tape is None:
        frame.tape = Tape()
    return frame.tape.put_off(original, args, kwargs, made)


def _made(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], x: Pending
) -> Pending | None:
    found = _read(original, args, kwargs, x)
    return None if found is None else turned(x, *found)


def _read(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], x: Pending
) -> Found | None:
    """Tables and dimension of the tokens of a call, `None` where it is not known what it does."""
    if not isinstance(original, types.FunctionType):
        return None
    names = _parameters(original)
    form = FORMS.get(names) or FORMS_BY_NAME.get((original.__name__, *names))
    defaults = original.__defaults__ or ()
    given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    given.update(zip(names, args, strict=False))
    given.update(kwargs)
    if form is None or len(args) > len(names) or given.keys() != set(names):
        return None
    found = form(given, x)
    if found is None:
        return None
    tables, place = (found[0].cos, found[0].sin), x.pieces[0].source.device
    fits = all(type(t) is torch.Tensor and t.device == place and t.dtype in FLOATS for t in tables)
    fits = fits and not any(t.requires_grad for t in tables)
    return found if fits and _is_as_large(*found, x.shape) else None


def _is_as_large(rope: Rope, axis: int, shape: tuple[int, ...]) -> bool:
    """Whether tables are of the size of a tensor or broadcast to it, and do not broadcast it."""
    batch, rows, heads, width = rope.extent()
    if batch not in (1, shape[0]) or rows != shape[axis]:
        return False
    if len(shape) == 3:
        return heads * width in (shape[2], shape[2] // 2) and shape[2] % 2 == 0
    fits = width in (shape[3], shape[3] // 2) and shape[3] % 2 == 0
    return fits and heads in (1, shape[3 - axis])


@functools.cache
def _parameters(function: types.FunctionType) -> tuple[str, ...]:
    """The names of a function's parameters, all of which may be given by place."""
    code = function.__code__
    plain = not code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount] if plain and not code.co_kwonlyargcount else ()


def _of_diffusers(given: Arguments, x: Pending) -> Found | None:
    """`diffusers.models.embeddings`: Flux, CogVideoX, Hunyuan and many others; and Qwen-Image.

    Complex numbers of each token, or a pair of tables along the dimension that is told, the third
    one where none is.
    """
    freqs = given["freqs_cis"]
    if len(x.shape) != 4:
        return None
    if not given["use_real"]:
        return _complex(freqs)
    if given["use_real_unbind_dim"] not in (-1, -2) or not _is_pair(freqs, 2):
        return None
    rope = Rope(freqs[0], freqs[1], given["use_real_unbind_dim"] == -1)
    return rope, given.get("sequence_dim", 2)


def _complex(freqs: object) -> Found | None:
    """Complex numbers of each token, `(S, D/2)` or `(B, S, D/2)`."""
    if not isinstance(freqs, torch.Tensor) or freqs.dtype != torch.complex64:
        return None
    return (Rope.of(freqs), 1) if freqs.dim() in (2, 3) else None


def _of_z_image(given: Arguments, x: Pending) -> Found | None:
    """Z-Image and its kin: complex numbers, `(B, S, D/2)`."""
    freqs = given["freqs_cis"]
    return _complex(freqs) if len(x.shape) == 4 and _rank(freqs) == 3 else None


def _of_wan(given: Arguments, x: Pending) -> Found | None:
    """Wan and its kin: `(1, S, 1, D)` tables in fp32, a cosine and a sine of each pair."""
    cos, sin = given["freqs_cos"], given["freqs_sin"]
    if len(x.shape) != 4 or not _is_pair((cos, sin), 4) or cos.dtype != torch.float32:
        return None
    return Rope(cos[..., 0::2], sin[..., 1::2]), 1


def _of_channels(given: Arguments, x: Pending) -> Found | None:
    """LTX: `(B, S, C)` tables over the channels of all heads."""
    return (Rope(*given["freqs"]), 1) if len(x.shape) == 3 and _is_pair(given["freqs"], 3) else None


def _of_halves(given: Arguments, x: Pending) -> Found | None:
    """LTX-2: `(B, H, S, D/2)` tables of each head, whose halves are pairs."""
    freqs = given["freqs"]
    if not _is_pair(freqs, 4) or len(x.shape) != 3:
        return None
    cos, sin = (table.transpose(1, 2) for table in freqs)
    return Rope(cos, sin, interleaved=False), 1


def _is_pair(given: object, rank: int) -> bool:
    if not isinstance(given, tuple | list) or len(given) != 2:
        return False
    return all(_rank(table) == rank for table in given) and given[0].shape == given[1].shape


def _rank(given: object) -> int:
    return given.dim() if isinstance(given, torch.Tensor) else 0


FORMS: dict[tuple[str, ...], Form] = {
    ("x", "freqs_cis", "use_real", "use_real_unbind_dim", "sequence_dim"): _of_diffusers,
    ("x", "freqs_cis", "use_real", "use_real_unbind_dim"): _of_diffusers,
    ("x_in", "freqs_cis"): _of_z_image,
    ("hidden_states", "freqs_cos", "freqs_sin"): _of_wan,
}
FORMS_BY_NAME: dict[tuple[str, ...], Form] = {
    ("apply_rotary_emb", "x", "freqs"): _of_channels,
    ("apply_interleaved_rotary_emb", "x", "freqs"): _of_channels,
    ("apply_split_rotary_emb", "x", "freqs"): _of_halves,
}
