"""What a call does on a GPU, recorded once and repeated for the same call with other tensors.

Python spends some 0.3 ms on a call of a quantized kernel: a dozen allocations and views, and
Triton's binder, which reads type, value and alignment of each value of a launch to find its build.
All of it follows from the key of the call. A launch graph keeps the builds, and for each argument
its value, or the tensor and the place in it that it points to; a repetition makes one allocation
for all scratch and hands the builds over to the driver.

Kernels take part by `launch`, `empty` and `zeros` of this module. A call is not recorded if one of
its arguments points to anything but its inputs, its outputs and that scratch.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

ALIGNMENT = 512
"""Bytes that torch's allocator aligns to, and parts of a workspace likewise."""

POINTER_ALIGNMENT = 16
"""A build may read so many bytes at once where its pointers were aligned to them."""

MOST_ADDRESSES = 16
"""Of scratch, for which a launch graph keeps its arguments; an allocator comes back to a few."""

_thread = threading.local()

Outputs = tuple[torch.Tensor, torch.Tensor | None]


def launch(kernel: Any, programs: int, *args: object, **options: object) -> None:  # noqa: ANN401
    """Launch a Triton kernel on the current stream, and note it where a call is being recorded.

    Args:
        kernel: a `triton.jit` or `gluon.jit` function.
        programs: size of its grid.
        args: its first arguments, all that are no constants.
        options: its constants, and options of the compiler.
    """
    recorder = getattr(_thread, "recorder", None)
    if recorder is not None and recorder.only_compile:
        built = kernel.run(*args, grid=(programs,), warmup=True, **options)
    else:
        built = kernel[(programs,)](*args, **options)
    if recorder is not None:
        recorder.launches.append((kernel, programs, args, options, built))


def empty(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Uninitialised scratch."""
    return _noted(torch.empty(shape, dtype=dtype, device=device), zeroed=False)


def zeros(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Scratch of zeros."""
    return _noted(torch.zeros(shape, dtype=dtype, device=device), zeroed=True)


def _noted(scratch: torch.Tensor, *, zeroed: bool) -> torch.Tensor:
    recorder = getattr(_thread, "recorder", None)
    if recorder is not None:
        recorder.scratch.append((scratch, zeroed))
    return scratch


def aligned(addresses: Sequence[int]) -> bool:
    """Whether the builds of a launch graph may read there."""
    together = 0
    for address in addresses:
        together |= address
    return together % POINTER_ALIGNMENT == 0


def has_launch_hooks() -> bool:
    """Whether somebody, such as a profiler, wants to hear of Triton's launches."""
    runtime = _runtime()
    return _listens(runtime.launch_enter_hook) or _listens(runtime.launch_exit_hook)


def _listens(hook: Any) -> bool:  # noqa: ANN401
    """Whether a list of hooks holds one; a function in its place is one."""
    return hook is not None and bool(getattr(hook, "calls", True))


@functools.cache
def _runtime() -> Any:  # noqa: ANN401
    """Where Triton keeps those who do."""
    from triton import knobs

    return knobs.runtime


@dataclass(slots=True)
class LaunchRecorder:
    """What a call did so far.

    Attributes:
        launches: kernel, programs, arguments, options and build of each launch.
        scratch: tensors, and whether they began as zeros; they stay alive, so that no two of a call
            have one address.
        only_compile: launches are compiled and noted, and nothing runs.
    """

    launches: list[tuple[Any, int, tuple[object, ...], dict[str, object], Any]] = field(
        default_factory=list
    )
    scratch: list[tuple[torch.Tensor, bool]] = field(default_factory=list)
    only_compile: bool = False


@contextmanager
def recording(*, only_compile: bool = False) -> Iterator[LaunchRecorder]:
    """Record what this thread launches, or would launch."""
    before = getattr(_thread, "recorder", None)
    _thread.recorder = recorder = LaunchRecorder(only_compile=only_compile)
    try:
        yield recorder
    finally:
        _thread.recorder = before


class _Place(NamedTuple):
    """Where a pointer of a launch comes from.

    Attributes:
        argument: its number among the arguments, those inside of tuples counted one by one.
        base: number of a tensor: the inputs, then the output, the LSE, scratch and zeros.
        offset: bytes from its beginning.
        descriptor: what describes tiles there, without its tensor; `None` for a plain pointer.
    """

    argument: int
    base: int
    offset: int
    descriptor: Any


class Launch(NamedTuple):
    """One launch of a launch graph: a build, its arguments, and which of them are addresses.

    Attributes:
        name: of the kernel.
        run: launches the build.
        programs: size of the grid.
        function: the driver's handle.
        metadata: what Triton's launcher wants to know of the build.
        arguments: values, `None` for each pointer; those of tuples with pointers lie flat.
        groups: how they lie in tuples, `None` for one that lies in none.
        outside: pointers into inputs and outputs.
        inside: pointers into scratch.
    """

    name: str
    run: Any
    programs: int
    function: Any
    metadata: Any
    arguments: tuple[object, ...]
    groups: tuple[Any, ...]
    outside: tuple[_Place, ...]
    inside: tuple[_Place, ...]


def memset(size: int, device: torch.device) -> torch.Tensor:
    """Bytes of zeros, which take a launch of their own."""
    return torch.zeros(size, dtype=torch.uint8, device=device)


def relaunch(one: Launch, stream: int, arguments: Sequence[object]) -> None:
    """Hand a build over to the driver."""
    one.run(one.programs, 1, 1, stream, one.function, one.metadata, None, None, None, *arguments)


class _Hole(NamedTuple):
    """An argument, a pointer or a tuple with some, that differs from call to call."""

    number: int
    values: list[object]
    group: tuple[Any, ...] | None
    places: tuple[_Place, ...]


_Pointed = tuple[list[object], list[_Hole]]
"""The arguments of a launch, and those of them that are filled in at each call."""


class _Form(NamedTuple):
    """What a new output has of the recorded one."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class LaunchGraph:
    """The launches of a call, for tensors of the same shapes, strides, dtypes and alignment."""

    def __init__(
        self,
        launches: Sequence[Launch],
        forms: tuple[_Form, _Form | None],
        sizes: tuple[int, int],
        device: torch.device,
    ) -> None:
        self._launches = tuple(launches)
        self._forms = forms
        self._scratch_bytes, self._zeroed_bytes = sizes
        self._device = device
        self._pointed: dict[tuple[int, int], list[_Pointed]] = {}

    def replay(self, addresses: Sequence[int]) -> Outputs:
        """The outputs of the call with inputs at other addresses, on the current stream.

        Args:
            addresses: `aligned` ones, in the order of the recorded inputs, 0 for what was `None`.
        """
        device = self._device
        form_of_out, form_of_lse = self._forms
        out = _new(form_of_out, device)
        lse = None if form_of_lse is None else _new(form_of_lse, device)
        scratch = zeroed = None
        if size := self._scratch_bytes:
            scratch = torch.empty(size, dtype=torch.uint8, device=device)
        if size := self._zeroed_bytes:
            zeroed = memset(size, device)
        outside = [*addresses, out.data_ptr(), 0 if lse is None else lse.data_ptr()]
        at = (
            0 if scratch is None else scratch.data_ptr(),
            0 if zeroed is None else zeroed.data_ptr(),
        )
        pointed = self._pointed.get(at) or self._pointed_at(at, len(outside))
        stream = _stream(device)
        for one, (arguments, holes) in zip(self._launches, pointed, strict=True):
            given = arguments.copy()
            for number, values, group, places in holes:
                filled = values.copy()
                for place, base, offset, descriptor in places:
                    filled[place] = _pointer(outside[base] + offset, descriptor)
                given[number] = filled[0] if group is None else _grouped(iter(filled), group)
            relaunch(one, stream, given)
        return out, lse

    def _pointed_at(self, at: tuple[int, int], first: int) -> list[_Pointed]:
        """The arguments of all launches with scratch at an address, where it often lies again."""
        pointed = []
        for one in self._launches:
            values = list(one.arguments)
            for number, base, offset, descriptor in one.inside:
                values[number] = _pointer(at[base - first] + offset, descriptor)
            pointed.append(_pointed(values, one.groups, one.outside))
        if len(self._pointed) >= MOST_ADDRESSES:
            self._pointed.clear()
        self._pointed[at] = pointed
        return pointed


def graph_of(
    recorder: LaunchRecorder, inputs: Sequence[torch.Tensor | None], outputs: Outputs
) -> LaunchGraph | None:
    """The launch graph of a recorded call, `None` where it cannot be repeated.

    Args:
        recorder: what it did.
        inputs: no two of them at one address.
        outputs: what it returned.
    """
    out, lse = outputs
    tensors = [*inputs, out, lse]
    spans, sizes = _map_of(recorder, tensors)
    launches = []
    for kernel, programs, args, options, built in recorder.launches:
        if built is None:  # Triton's interpreter
            return None
        names = kernel.arg_names[len(args) :]
        arguments = (*args, *(options[name] for name in names))
        one = _launch_of(spans, kernel.__name__, built, programs, arguments, len(tensors))
        if one is None:
            return None
        launches.append(one)
    if not launches:
        return None
    forms = (_form(out), None if lse is None else _form(lse))
    return LaunchGraph(launches, forms, sizes, out.device)


def _stream(device: torch.device) -> int:
    stream: int = _streams()(device.index)
    return stream


@functools.cache
def _streams() -> Any:  # noqa: ANN401
    """What tells the current stream of a device."""
    from triton.runtime import driver

    return driver.active.get_current_stream


class _Span(NamedTuple):
    """Addresses of one tensor, and what they are called in a repetition."""

    begin: int
    end: int
    base: int
    offset: int


def _map_of(
    recorder: LaunchRecorder, tensors: Sequence[torch.Tensor | None]
) -> tuple[list[_Span], tuple[int, int]]:
    """What each address of a recorded call is, and the sizes of its scratch.

    Of inputs only their first address, since views of one buffer may overlap; the last two tensors
    are outputs, which do not.
    """
    spans = [
        _Span(t.data_ptr(), t.data_ptr() + (t.nbytes if base >= len(tensors) - 2 else 1), base, 0)
        for base, t in enumerate(tensors)
        if t is not None
    ]
    ends = [0, 0]
    for scratch, zeroed in recorder.scratch:
        begin, size = scratch.data_ptr(), scratch.untyped_storage().nbytes()
        spans.append(_Span(begin, begin + size, len(tensors) + zeroed, ends[zeroed]))
        ends[zeroed] += -(-size // ALIGNMENT) * ALIGNMENT
    return spans, (ends[0], ends[1])


def _launch_of(
    spans: Sequence[_Span],
    name: str,
    built: Any,  # noqa: ANN401
    programs: int,
    arguments: Sequence[object],
    first: int,
) -> Launch | None:
    """A launch with its pointers found, `None` where one points elsewhere."""
    groups = tuple(_group_of(value) for value in arguments)
    values: list[object] = list(_flat(arguments, groups))
    places = []
    for number, value in enumerate(tuple(values)):
        tensor = _tensor_of(value)
        if tensor is None:
            continue
        address = tensor.data_ptr()
        span = next((s for s in spans if s.begin <= address < s.end), None)
        if span is None:
            return None
        descriptor = None if tensor is value else _without_tensor(value)
        places.append(_Place(number, span.base, span.offset + address - span.begin, descriptor))
        values[number] = None
    return Launch(
        name,
        built.run,
        programs,
        built.function,
        built.packed_metadata,
        tuple(values),
        groups,
        tuple(place for place in places if place.base < first),
        tuple(place for place in places if place.base >= first),
    )


def _tensor_of(value: object) -> torch.Tensor | None:
    """The tensor that an argument points to, itself or as a descriptor."""
    tensor = value if isinstance(value, torch.Tensor) else getattr(value, "base", None)
    return tensor if isinstance(tensor, torch.Tensor) else None


def _group_of(value: object) -> tuple[Any, ...] | None:
    """How pointers lie in a tuple; `None` for all else, tuples without pointers among them."""
    if not isinstance(value, tuple):
        return None
    groups = tuple(_group_of(one) for one in value)
    return groups if any(groups) or any(_tensor_of(one) is not None for one in value) else None


def _flat(values: Sequence[object], groups: Sequence[Any]) -> Iterator[object]:
    for value, group in zip(values, groups, strict=True):
        if group is None:
            yield value
        else:
            yield from _flat(cast("tuple[object, ...]", value), group)


def _grouped(values: Iterator[object], groups: tuple[Any, ...]) -> tuple[object, ...]:
    return tuple(next(values) if one is None else _grouped(values, one) for one in groups)


def _pointed(
    values: Sequence[object], groups: Sequence[Any], outside: Sequence[_Place]
) -> _Pointed:
    """Part flat values into arguments, so that a call touches only those that it changes."""
    arguments: list[object] = []
    holes = []
    begin = 0
    for number, group in enumerate(groups):
        end = begin + _size(group)
        own = list(values[begin:end])
        places = tuple(p._replace(argument=p.argument - begin) for p in outside
                       if begin <= p.argument < end)  # fmt: skip
        arguments.append(own[0] if group is None else _grouped(iter(own), group))
        if places:
            holes.append(_Hole(number, own, group, places))
        begin = end
    return arguments, holes


def _size(group: tuple[Any, ...] | None) -> int:
    """How many flat values an argument has."""
    return 1 if group is None else sum(map(_size, group))


class _Address:
    """Stands for the tensor of a descriptor."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self._address


def _without_tensor(descriptor: Any) -> Any:  # noqa: ANN401
    bare = copy.copy(descriptor)
    bare.base = None
    return bare


def _pointer(address: int, descriptor: Any) -> object:  # noqa: ANN401
    """A pointer as a launcher takes it: a number, or what describes tiles there."""
    if descriptor is None:
        return address
    described = copy.copy(descriptor)
    described.base = _Address(address)
    return described


def _form(tensor: torch.Tensor) -> _Form:
    return _Form(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _new(form: _Form, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=device)
