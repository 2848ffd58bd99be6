"""Resolve a call of paged attention before its data is touched, once per key, and run it."""

from __future__ import annotations

from typing import Protocol

from sage_plugin import device, settings
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.launch_graph import Outputs
from sage_plugin.kernels.paged_attention.call import PagedCall, PagedRequest
from sage_plugin.kernels.paged_attention.dispatch import decide
from sage_plugin.kernels.paged_attention.launch_space import find_launch, illegal_reason
from sage_plugin.kernels.paged_attention.validate import PagedNumbers, checked_call
from sage_plugin.kernels.repeats import Repeats
from sage_plugin.kernels.surroundings import on_device, without_autocast
from sage_plugin.paged_records import PagedLaunch
from sage_plugin.schema import DeviceFacts


class PagedBackend(Protocol):
    """What runs calls of one key."""

    def run(self, call: PagedCall) -> Outputs:
        """Return the output `(T, Hq, D)` and the LSE `(Hq, T)` or `None`."""


class PagedExecutor(Repeats):
    """What runs the calls of one key, on a GPU from the recorded launches once there are any.

    Attributes:
        decision: kernel and backend.
        launch: the launch config.
    """

    __slots__ = ("_backend", "decision", "launch")

    def __init__(self, decision: Decision, backend: PagedBackend, launch: PagedLaunch) -> None:
        super().__init__()
        self.decision, self._backend, self.launch = decision, backend, launch

    def run(self, call: PagedCall) -> Outputs:
        """Run a call of this key."""
        if self.decision.variant == "triton" and call.q.is_cuda:
            return self.repeat(call.tensors(), call.q.device, self._anew, call)
        return self._anew(call)

    def _anew(self, call: PagedCall) -> Outputs:
        with on_device(call.q.device), without_autocast(call.q.device):
            return self._backend.run(call)


MOST_EXECUTORS = 1024
"""About 10 KB each; a server's batches come back to a few numbers of tokens and sequences."""

_resolved: Memo[PagedExecutor] = Memo(MOST_EXECUTORS)


def resolve(call: PagedCall, request: PagedRequest) -> PagedExecutor:
    """Return what runs a call; eager mode only.

    Raises:
        UnsupportedInputError: tensors that do not fit together, or that no kernel takes here.
        ConfigError: the environment's launch config is not legal.
    """
    key = (call.key(), request, settings.of_calls())
    answer = _resolved.get(key)
    if answer is None:
        answer = _resolve(call, request)
        if answer.decision.variant != "triton" or call.q.is_cuda:  # TRITON_INTERPRET may change
            _resolved.keep(key, answer)
    return answer


def _resolve(call: PagedCall, request: PagedRequest) -> PagedExecutor:
    numbers = checked_call(call)
    where = call.q.device
    facts = device.facts_of(where.type, where.index)
    decision = decide(call, facts, request)
    launch = _launch(call, decision, facts, request.launch)
    backend = _built(call, decision, numbers, facts, launch)
    return PagedExecutor(decision, backend, launch)


def _launch(
    call: PagedCall, decision: Decision, facts: DeviceFacts, given: PagedLaunch | None
) -> PagedLaunch:
    key = call.launch_key(decision.kernel, decision.variant)
    launch: PagedLaunch = given or find_launch(key, facts).config
    reason = illegal_reason(launch, key, facts)
    if reason is not None:
        raise UnsupportedInputError(f"launch config {launch.text()}: {reason}")
    return launch


def _built(
    call: PagedCall,
    decision: Decision,
    numbers: PagedNumbers,
    facts: DeviceFacts,
    launch: PagedLaunch,
) -> PagedBackend:
    if decision.variant == "emulation":
        from sage_plugin.kernels.paged_attention.backends.emulation import PagedEmulation

        return PagedEmulation(decision.kernel, numbers, launch)
    from sage_plugin.kernels.paged_attention.backends.triton.launch import PagedTriton

    few = None
    if call.kind() == "mixed":
        key = call.launch_key(decision.kernel, decision.variant, "decode")
        few = find_launch(key, facts).config
    return PagedTriton(decision.kernel, numbers, launch, few, facts.sm_count)
