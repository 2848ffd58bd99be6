"""Tensors that were put off, and the tape of what was to be done.

A norm or a rotary embedding of Q or K inside a patched processor is not computed but written down,
and so is what moves tokens about until attention: parting heads, slices, concatenation. Attention
then gets both tensors by one kernel (`settle.py`). Whatever else is done with such a tensor first
has the tape repeated, call by call as the model made them, and goes on with what comes out.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from sage_plugin.plugin.prologue.pending import Pending
from sage_plugin.plugin.prologue.unfused import Unfused

Function = Callable[..., Any]
HANDLERS: dict[Function, Function] = {}
"""What writes an operation down, by torch's function; `operations.py` fills it."""
OF_TENSORS: Any = torch.Tensor
METADATA = frozenset(
    (
        OF_TENSORS.shape.__get__, OF_TENSORS.dtype.__get__, OF_TENSORS.device.__get__,
        OF_TENSORS.ndim.__get__, OF_TENSORS.is_cuda.__get__, OF_TENSORS.requires_grad.__get__,
        OF_TENSORS.layout.__get__, OF_TENSORS.size, OF_TENSORS.dim, OF_TENSORS.numel,
        OF_TENSORS.__len__, OF_TENSORS.is_floating_point, OF_TENSORS.is_complex,
        OF_TENSORS.ndimension, OF_TENSORS.nelement, OF_TENSORS.element_size,
    )
)  # fmt: skip
"""What is known of a tensor without its values."""


class Slot(NamedTuple):
    """Stands in the arguments of a call for the result of an earlier one."""

    number: int


class Call(NamedTuple):
    """A call on a tape.

    Attributes:
        function: what is called.
        args: its arguments, with slots for what is on the tape itself.
        kwargs: those by name.
        made: what stands for its result, `None` where it changes its first argument.
        base: what its result is a view of.
    """

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: weakref.ref[DeferredTensor] | None
    base: int | None = None


class Tape:
    """The calls that one call of a processor has put off, in their order.

    Attributes:
        unfused: why the last of them were made after all.
    """

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self.unfused: Unfused | None = None

    def put_off(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Pending,
        base: Slot | None = None,
    ) -> DeferredTensor:
        """Write a call down, and return what stands for its result, a view of `base` if any."""
        slot = Slot(len(self._calls))
        out = DeferredTensor(self, slot, made)
        of = None if base is None else base.number
        self._calls.append(Call(function, _slotted(args), _slotted(kwargs), weakref.ref(out), of))
        return out

    def put_off_change(self, function: Function, args: tuple[Any, ...]) -> None:
        """Write down a call that changes a tensor in place."""
        self._calls.append(Call(function, _slotted(args), {}, None))

    def has_views_of(self, slot: Slot) -> bool:
        """Whether somebody holds a view of a result, or what it is a view of."""
        family = {slot.number}
        bases = {i: c.base for i, c in enumerate(self._calls) if c.base is not None}
        for number in sorted(bases, reverse=True):
            if number in family:
                family.add(bases[number])
        for number in sorted(bases):
            if bases[number] in family:
                family.add(number)
        made = (self._calls[number].made for number in family - {slot.number})
        return any(ref is not None and ref() is not None for ref in made)

    def is_done(self) -> bool:
        """Whether nobody waits for it."""
        made = (ref() for call in self._calls if (ref := call.made) is not None)
        return not any(map(is_waiting, made))

    def repeat(self, reason: Unfused) -> None:
        """Make all calls, and give those who wait their results."""
        made = ((number, ref()) for number, c in enumerate(self._calls) if (ref := c.made))
        waiting = {number: x for number, x in made if x is not None and x.value is None}
        values = self.results(frozenset(waiting))
        self._calls.clear()
        self.unfused = reason
        for number, out in waiting.items():
            out.settle(values[number])

    def results(self, wanted: frozenset[int]) -> dict[int, Any]:
        """What the calls of some numbers give; other results are freed after their last use."""
        needed = set(wanted)
        for number, call in reversed([*enumerate(self._calls)]):
            if number in needed or (call.made is None and call.args[0].number in needed):
                needed.update((number, *_slots(call)))
        calls = [(number, call) for number, call in enumerate(self._calls) if number in needed]
        last = {slot: number for number, call in calls for slot in _slots(call)}
        values: dict[int, Any] = {}
        for number, call in calls:
            args, kwargs = _filled(call.args, values), _filled(call.kwargs, values)
            values[number] = call.function(*args, **kwargs)
            del args, kwargs
            for slot in (*_slots(call), number):
                if slot not in wanted and last.get(slot, number) <= number:
                    values.pop(slot, None)
        return values


class DeferredTensor(torch.Tensor):
    """A tensor that was put off: it has a shape and no values until somebody wants them.

    Attributes:
        tape: where it is written down; `None` once it has values.
        slot: which of the tape's results it is.
        pending: what it will be.
        value: the tensor itself, once it is known.
    """

    tape: Tape | None
    slot: Slot
    pending: Pending | None
    value: torch.Tensor | None

    def __new__(cls, tape: Tape, slot: Slot, made: Pending) -> DeferredTensor:
        """Make one without values, on the device and of the dtype of its first source."""
        source = made.pieces[0].source
        out: DeferredTensor = torch.Tensor._make_wrapper_subclass(
            cls, made.shape, dtype=source.dtype, device=source.device
        )
        out.tape, out.slot, out.pending, out.value = tape, slot, made, None
        return out

    def __init__(self, tape: Tape, slot: Slot, made: Pending) -> None:
        pass

    def settle(self, value: torch.Tensor) -> None:
        """Take its values, and let go of what they came from."""
        self.value, self.tape, self.pending = value, None, None

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Write down what is known, and compute before all else."""
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        handler = HANDLERS.get(func)
        if handler is not None:
            done = handler(func, *args, **(kwargs or {}))
            if done is not NotImplemented:
                return done
        return func(*computed(args), **computed(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Function,
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Compute what comes by a way that torch's functions do not go."""
        return func(*computed(args), **computed(kwargs or {}))


def is_waiting(x: object) -> bool:
    """Whether a tensor was put off and has no values yet."""
    return isinstance(x, DeferredTensor) and x.value is None


def shape_of(x: torch.Tensor) -> tuple[int, ...]:
    """A tensor's shape, without a way through torch where it was put off."""
    pending = x.pending if isinstance(x, DeferredTensor) else None
    return tuple(x.shape) if pending is None else pending.shape


def shown(given: Any) -> Any:  # noqa: ANN401
    """Arguments with values in the place of tensors that have them by now."""
    return _mapped(given, lambda x: x if x.value is None else x.value)


def computed(given: Any, reason: Unfused = Unfused.OPERATION) -> Any:  # noqa: ANN401
    """Arguments with values in the place of all tensors that were put off."""

    def value_of(x: DeferredTensor) -> torch.Tensor:
        if x.value is None:
            assert x.tape is not None, "what waits is on a tape"
            x.tape.repeat(reason)
        assert x.value is not None, "a tape gives values to all who wait"
        return x.value

    return _mapped(given, value_of)


def _mapped(given: Any, change: Callable[[DeferredTensor], Any]) -> Any:  # noqa: ANN401
    kind = type(given)
    if kind is DeferredTensor:
        return change(given)
    if kind is tuple or kind is list:
        return kind([_mapped(one, change) for one in given])
    if kind is dict:
        return {name: _mapped(one, change) for name, one in given.items()}
    return given


def _slotted(given: Any) -> Any:  # noqa: ANN401
    return _mapped(given, lambda x: x.slot if x.value is None else x.value)


def _slots(call: Call) -> Iterator[int]:
    def of(given: Any) -> Iterator[int]:  # noqa: ANN401
        if type(given) is Slot:
            yield given.number
        elif type(given) in (tuple, list):
            for one in given:
                yield from of(one)
        elif type(given) is dict:
            yield from of(tuple(given.values()))

    yield from of((call.args, call.kwargs))


def _filled(given: Any, values: dict[int, Any]) -> Any:  # noqa: ANN401
    if type(given) is Slot:
        return values[given.number]
    if type(given) in (tuple, list):
        return type(given)(_filled(one, values) for one in given)
    if type(given) is dict:
        return {name: _filled(one, values) for name, one in given.items()}
    return given
