"""From a call to what runs it, once per key: the same way for every op family.

The key is all that an answer follows from: the call without its data, what was asked for, and the
environment. A call of a known key costs one look at a dict; `launch_config.forget` drops them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from sage_plugin import device, settings
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.contract import HOST, Decision, ResolvedConfig
from sage_plugin.kernels.launch_config import LaunchRules, Memo
from sage_plugin.kernels.support import IN_TRITON
from sage_plugin.schema import AnyKey, AnyLaunch, DeviceFacts

Answer = TypeVar("Answer")


class ResolvableCall(Protocol):
    """A call as the resolver takes it."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""

    def key(self) -> tuple[object, ...]:
        """Return all that an answer follows from: the call without its data."""


class BackendRequest(NamedTuple):
    """What shall compute a call.

    Attributes:
        kernel: kernel name or `"auto"`.
        backend: backend name or `"auto"`.
        launch: launch config in place of the looked-up one.
        config_dir: folder of tuned configs that is searched before the others.
    """

    kernel: str = "auto"
    backend: str = "auto"
    launch: Any = None
    config_dir: str | None = None


Request = Any
"""A `BackendRequest`, or attention's, which has more."""


class Resolution(NamedTuple):
    """What is known of a call before its implementation is built.

    Attributes:
        decision: kernel and backend.
        facts: the device.
        launch: the launch config that was given or found; `None` where nothing is tuned.
        found: where it came from; `None` where it was given or nothing is tuned.
        key: the key of its look-up; `None` where there was none.
    """

    decision: Decision
    facts: DeviceFacts
    launch: Any = None
    found: ResolvedConfig | None = None
    key: Any = None


@dataclass(frozen=True, slots=True)
class Resolver(Generic[Answer]):
    """The resolver of an op family; in eager mode only.

    Attributes:
        decide: kernel and backend of a call, or why it falls back; raises for tensors that do not
            fit together.
        launch_key: the key under which a launch config is looked up; `None` where none is tuned.
        rules: the family's launch configs.
        build: what runs the calls of a key.
        answers: what was answered, executors and reasons of fallbacks.
    """

    decide: Callable[[Any, DeviceFacts, Any], Decision]
    launch_key: Callable[[Any, Decision], AnyKey | None]
    rules: LaunchRules
    build: Callable[[Any, Request, Resolution], Answer]
    answers: Memo[Answer]

    def known(self, call: ResolvableCall, request: Request) -> Answer | None:
        """Return the answer to a call that was resolved before, `None` for any other."""
        return self.answers.get((call.key(), request, settings.of_calls()))

    def resolve(self, call: ResolvableCall, request: Request) -> Answer:
        """Return what runs a call, or why it falls back.

        Raises:
            UnsupportedInputError: arguments that do not fit together, a kernel that cannot run on
                the device, or a launch config that is not legal.
            UnknownKernelError: no kernel or backend of that name.
            ConfigError: the environment's launch config is not legal.
        """
        try:
            key = (call.key(), request, settings.of_calls())
            answer = self.answers.get(key)
        except TypeError:  # an argument without a hash
            return self.anew(call, request)
        if answer is None:
            answer = self.anew(call, request)
            decision: Decision | None = getattr(answer, "decision", None)
            on_gpu = decision is not None and decision.variant in IN_TRITON
            if not on_gpu or call.device.type != "cpu":  # that depends on TRITON_INTERPRET
                self.answers.keep(key, answer)
        return answer

    def anew(self, call: ResolvableCall, request: Request) -> Answer:
        """Decide, look up and build."""
        where = call.device
        facts = device.facts_of(where.type, where.index)
        decision = self.decide(call, facts, request)
        if decision.reason is not None:
            return decision.reason  # type: ignore[return-value]  # part of the families' answers
        check_place(decision, facts, self.rules)
        key, launch, found = self.launch_key(call, decision), request.launch, None
        if key is None:
            return self.build(call, request, Resolution(decision, facts))
        if launch is not None:
            check_launch(launch, key, facts, self.rules)
        elif decision.variant != HOST:
            folder = str(request.config_dir) if request.config_dir else None
            found = self.rules.find(key, facts, config_dir=folder)
            launch = found.config
        looked_up = None if found is None else key
        return self.build(call, request, Resolution(decision, facts, launch, found, looked_up))


def check_place(decision: Decision, facts: DeviceFacts, rules: LaunchRules) -> None:
    """Raise if a backend of GPUs is asked for on a CPU, unless Triton's interpreter runs it.

    Raises:
        UnsupportedInputError: it is.
    """
    if decision.variant in IN_TRITON and facts.kind == "cpu" and not settings.triton_interpreted():
        emulation = rules.emulation.format(kernel=decision.kernel)
        raise UnsupportedInputError(
            f"kernel {decision.label} runs on a GPU and the tensors are on the CPU; move them, use "
            f"{emulation}, or set TRITON_INTERPRET=1 before Triton is imported"
        )


def check_launch(launch: AnyLaunch, key: AnyKey, facts: DeviceFacts, rules: LaunchRules) -> None:
    """Raise if a launch config cannot run a call on a device.

    Raises:
        UnsupportedInputError: it cannot.
    """
    if not isinstance(launch, rules.kind):
        raise UnsupportedInputError(
            f"launch is {type(launch).__name__}; give a sage_plugin.schema.{rules.kind.__name__}, "
            "or leave it out for the config that is found"
        )
    if reason := rules.illegal_reason(launch, key, facts):
        raise UnsupportedInputError(f"launch config {launch.text()} cannot run here: {reason}")
