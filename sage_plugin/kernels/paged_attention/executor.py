"""What runs a call of paged attention, and how a call is resolved to it."""

from __future__ import annotations

from typing import Protocol

from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.launch_config import Memo
from sage_plugin.kernels.launch_graph import Outputs
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.kernels.paged_attention.dispatch import decide
from sage_plugin.kernels.paged_attention.launch_space import RULES
from sage_plugin.kernels.paged_attention.validate import checked_call
from sage_plugin.kernels.repeats import Repeats
from sage_plugin.kernels.resolver import BackendRequest, Resolution, Resolver
from sage_plugin.kernels.surroundings import on_device, without_autocast
from sage_plugin.paged_records import PagedKey, PagedLaunch
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


def _checked(call: PagedCall, facts: DeviceFacts, request: BackendRequest) -> Decision:
    checked_call(call)
    return decide(call, facts, request)


def _launch_key(call: PagedCall, decision: Decision) -> PagedKey:
    return call.launch_key(decision.kernel, decision.variant)


def _build(call: PagedCall, request: BackendRequest, found: Resolution) -> PagedExecutor:
    kernel, backend = found.decision.kernel, found.decision.variant
    launch, numbers = found.launch, checked_call(call)
    if backend == "emulation":
        from sage_plugin.kernels.paged_attention.backends.emulation import PagedEmulation

        return PagedExecutor(found.decision, PagedEmulation(kernel, numbers, launch), launch)
    from sage_plugin.kernels.paged_attention.backends.triton.launch import PagedTriton

    few = None
    if call.kind() == "mixed":
        key = call.launch_key(kernel, backend, "decode")
        few = RULES.find(key, found.facts, config_dir=request.config_dir).config
    made = PagedTriton(kernel, numbers, launch, few, found.facts.sm_count)
    return PagedExecutor(found.decision, made, launch)


resolver: Resolver[PagedExecutor] = Resolver(
    _checked, _launch_key, RULES, _build, Memo(MOST_EXECUTORS)
)
resolve = resolver.resolve
