"""Calls that are the same each time but for their tensors: recorded once, then repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.launch_graph import (
    LaunchGraph,
    Outputs,
    aligned,
    graph_of,
    has_launch_hooks,
    recording,
)
from sage_plugin.kernels.surroundings import on_device


class Repeats:
    """The launches of one kind of call on a GPU, once it was worth recording them.

    Attributes:
        recorded: the launches; `None` before that, and where they cannot be repeated.
    """

    __slots__ = ("_calls", "recorded")

    def __init__(self) -> None:
        self.recorded: LaunchGraph | None = None
        self._calls = 0

    def forget(self) -> None:
        """Forget the launches, which other calls follow from now on."""
        self.recorded, self._calls = None, 0

    def repeat(
        self,
        inputs: Sequence[torch.Tensor | None],
        device: torch.device,
        anew: Callable[..., Outputs],
        *args: object,
        keyed: Sequence[torch.Tensor] = (),
    ) -> Outputs:
        """Run a call: the first as it is, the second recorded, all others replayed.

        Args:
            inputs: every tensor that the call reads or writes, but for what it makes.
            device: where they are.
            anew: runs the call with `args`.
            args: what it takes.
            keyed: further inputs, whose alignment this kind of call has in its key.
        """
        addresses = [0 if t is None else t.data_ptr() for t in inputs]
        if self._calls == 0 or has_launch_hooks() or not aligned(addresses):
            self._calls = max(1, self._calls)
            return anew(*args)
        if keyed:
            inputs, addresses = [*inputs, *keyed], [*addresses, *(t.data_ptr() for t in keyed)]
        if self.recorded is not None:
            with on_device(device):
                return self.recorded.replay(addresses)
        if self._calls > 1 or not _no_aliasing(addresses):
            return anew(*args)
        with recording() as recorder:
            outputs = anew(*args)
        self.recorded, self._calls = graph_of(recorder, inputs, outputs), 2
        return outputs


def repeats_of(known: Memo[Repeats], key: tuple[object, ...]) -> Repeats:
    """Return the launches of a kind of call from a memo, where they are kept.

    Args:
        known: the memo.
        key: all that the launches follow from but addresses.
    """
    found = known.get(key)
    if found is None:
        found = Repeats()
        known.keep(key, found)
    return found


def _no_aliasing(addresses: Sequence[int]) -> bool:
    """Whether no two inputs lie at one address, which a recording cannot tell apart."""
    given = [address for address in addresses if address]
    return len(set(given)) == len(given)
