"""Tensors that were put off: whatever is done with them is what it would be with their values."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F

from sage_plugin.kernels.attention.prologue import emulation
from sage_plugin.kernels.attention.prologue.record import QkNorm, Rope
from sage_plugin.plugin.prologue import operations  # noqa: F401
from sage_plugin.plugin.prologue.deferred import DeferredTensor, Tape, is_waiting
from sage_plugin.plugin.prologue.pending import Pending, streams_of, turned
from sage_plugin.plugin.prologue.unfused import Unfused

HEADS, WIDTH, TOKENS = 3, 4, 10
ANGLES = torch.randn(TOKENS, WIDTH // 2, generator=torch.Generator().manual_seed(2))


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def turn(x: torch.Tensor) -> torch.Tensor:
    """Tokens of `(B, S, H, D)` turned by the last rows of the tables."""
    turned = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    angles = ANGLES[-x.shape[1] :, None]
    return torch.view_as_real(turned * torch.polar(torch.ones_like(angles), angles)).flatten(3)


def source(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, TOKENS, HEADS, WIDTH)))


def deferred(tape: Tape, x: torch.Tensor) -> DeferredTensor:
    return tape.put_off(
        norm, (x,), {}, Pending.whole(x, QkNorm("layer", across_heads=x.dim() == 3))
    )


def deferred_turn(x: DeferredTensor) -> DeferredTensor:
    angles = ANGLES[-x.shape[1] :]
    made = turned(x.pending, Rope(angles.cos(), angles.sin()), 1)
    return x.tape.put_off(turn, (x,), {}, made)


def replace_last(x, turn):
    """As CogVideoX turns what is behind the text."""
    x[:, 4:] = turn(x[:, 4:])
    return x


def replace_first(x, turn):
    """The first tokens turned, as where the text is behind."""
    x[:, :6] = turn(x[:, :6])
    return x


PUT_OFF = {
    "nothing": lambda x, turn: x,
    "turned": lambda x, turn: turn(x),
    "last_turned": replace_last,
    "first_turned": replace_first,
    "joint": lambda x, turn: turn(torch.cat([x[:, :3], x[:, 5:]], dim=1)),
    "front_turned": lambda x, turn: torch.cat([turn(x[:, :-4]), x[:, -4:]], 1),
    "with_plain": lambda x, turn: torch.cat([turn(x), PLAIN], 1),
    "permuted": lambda x, turn: x.permute(0, 2, 1, 3).permute((0, 2, 1, 3)),
    "idle_casts": lambda x, turn: (
        x.to(torch.float32).type_as(x).to(x.device).to(dtype=x.dtype).to(x)
    ),
    "all_said": lambda x, turn: turn(x[:, 2:, :, :]),
    "part_of_a_part": lambda x, turn: turn(x)[:, 2:9][:, 1:4],
}
PLAIN = source()


@pytest.mark.parametrize("name", PUT_OFF)
def test_what_is_written_down_comes_to_the_same_by_the_kernel_and_call_by_call(name):
    torch.manual_seed(0)
    x, build = source(), PUT_OFF[name]
    expected = build(norm(x), turn)
    for by_kernel in (True, False):
        found = build(deferred(Tape(), x), deferred_turn)
        assert is_waiting(found)
        assert found.shape == expected.shape
        if by_kernel:
            found = emulation.joined(streams_of(found.pending, "bshd"))
        torch.testing.assert_close(found + 0, expected, rtol=1e-5, atol=1e-5)


FLAT = {
    "unflatten": lambda x: x.unflatten(2, (HEADS, -1)),
    "last": lambda x: x.unflatten(-1, (-1, WIDTH)),
    "view": lambda x: x.view(2, -1, HEADS, WIDTH),
    "reshape": lambda x: x.reshape((2, TOKENS, HEADS, WIDTH)),
}


@pytest.mark.parametrize("name", FLAT)
def test_heads_may_be_parted_after_a_norm_across_them(name):
    x = source(2, TOKENS, HEADS * WIDTH)
    found = FLAT[name](deferred(Tape(), x)).transpose(1, 2)
    [stream] = streams_of(found.pending, "bhsd")
    assert stream.norm.across_heads
    expected = FLAT[name](norm(x))
    torch.testing.assert_close(emulation.joined([stream]), expected, rtol=1e-5, atol=1e-5)


def test_pieces_of_one_source_are_one_stream():
    x = source()
    found = replace_last(deferred(Tape(), x), deferred_turn)
    [stream] = streams_of(found.pending, "bshd")
    assert stream.source.data_ptr() == x.data_ptr()
    assert (stream.rope.skip, stream.rope.rows) == (4, TOKENS - 4)


def add_in_place(x):
    part = x[:, 2:4]
    part.add_(1)
    return x


def replace_beside_a_view(x):
    """A slice that lives on is a view of what changes."""
    part = x[:, 2:8]
    x[:, 4:] = x[:, 4:][:, :, :] * 1
    x[:, 4:] = norm(x[:, 4:])
    return part


def replace_below_a_base(x):
    y = x.transpose(1, 2)
    y[:, :, 1:3] = y[:, :, 5:7]
    return x


COMPUTED = {
    "sum": lambda x: x + 1,
    "on_the_right": lambda x: 1 - x,
    "function": F.gelu,
    "keyword": lambda x: torch.cat(tensors=[x, x], dim=1),
    "out": lambda x: torch.add(x, x, out=torch.empty(x.shape)),
    "other_axis": lambda x: torch.cat([x, x], 3),
    "channels": lambda x: x[..., 1:],
    "steps": lambda x: x[:, ::2],
    "one": lambda x: x[:, 3],
    "mask": lambda x: x[x > 0],
    "flat": lambda x: x.flatten(2),
    "dtype": lambda x: x.to(torch.bfloat16),
    "dtype_by_name": lambda x: x.to(dtype=torch.bfloat16),
    "flags": lambda x: x.to(x.dtype, copy=True),
    "stored": lambda x: torch.stack([x, x])[1],
    "copied": copy.deepcopy,
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
    "in_place": add_in_place,
    "beside_a_view": replace_beside_a_view,
    "below_a_base": replace_below_a_base,
    "strides": lambda x: torch.tensor(x.stride()),
    "heads_exchanged": lambda x: x.transpose(2, 3),
    "into_plain": lambda x: torch.zeros(2, TOKENS, HEADS, WIDTH).copy_(x),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "list": lambda x: torch.tensor(x.tolist()),
    "text": lambda x: torch.tensor([ord(c) for c in repr(x)]),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_anything_else_finds_the_values(name):
    torch.manual_seed(0)
    x, function = source(), COMPUTED[name]
    tape = Tape()
    found = function(deferred(tape, x))
    assert torch.equal(found + 0, function(norm(x)) + 0)
    assert tape.unfused is Unfused.OPERATION


def test_a_shape_is_known_without_values():
    tape = Tape()
    x = deferred(tape, source())
    told = (x.shape, x.dtype, x.device.type, x.dim(), x.size(1), len(x), x.ndim, x.numel())
    assert told == ((2, TOKENS, HEADS, WIDTH), torch.float32, "cpu", 4, TOKENS, 2, 4, 240)
    assert tape.unfused is None


def test_only_what_is_asked_for_is_computed():
    calls = []

    def counted(x):
        calls.append(len(calls))
        return norm(x)

    tape, x = Tape(), source()
    first, second = (tape.put_off(counted, (x,), {}, Pending.whole(x)) for _ in range(2))
    part = second[:, 1:]
    assert set(tape.results(frozenset((part.slot.number,)))) == {part.slot.number}
    assert calls == [0]
    assert not tape.is_done()
    del first
    assert torch.equal(part + 0, norm(x)[:, 1:])
    assert calls == [0, 1]
    assert tape.is_done()
    assert torch.equal(second + 0, norm(x))


def test_nothing_is_kept_alive():
    """A tape holds no tensor that stands on it: sources go when those do, without a collector."""
    gc.disable()
    try:
        x = source()
        ref = weakref.ref(x)
        found = replace_last(deferred(Tape(), x), deferred_turn)
        del x
        assert ref() is not None
        found.settle(torch.zeros(1))
        assert ref() is None
    finally:
        gc.enable()


def test_a_cast_like_one_that_waits_leaves_it_waiting() -> None:
    """As Wan casts attention's output to the dtype of Q."""
    tape, x = Tape(), source()
    waits = deferred(tape, x)
    made = x.double().type_as(waits)
    assert type(made) is torch.Tensor
    assert torch.equal(made, x)
    assert is_waiting(waits)
