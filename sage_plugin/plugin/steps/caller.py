"""Who makes a call of a denoiser: the innermost caller that holds it beside a scheduler.

Pipelines are copied for each request, made anew from the parts of another, and put into each other,
and all of them may run one model. Which one runs it now is told by the call stack alone.
"""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from sage_plugin.plugin.steps.scheduler import counts_steps, run_of

ANNOUNCED = "_num_timesteps"
"""Where pipelines of diffusers keep how many steps their loop has, before it begins."""
WRAPPERS = ("_orig_mod", "module")
"""Where compiled and distributed modules keep the module inside them."""

_PASSED_OVER = tuple(
    os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__))
)
"""Folders of code that runs no denoiser of its own: torch, and this package's plug-in."""
COMPONENTS = "components"
"""What the blocks of modular pipelines call the pipeline that they are given."""
NEAR = 6
"""Callers whose variables are looked at: a loop of somebody's own is not far from its model."""

_known: weakref.WeakKeyDictionary[CodeType, str] = weakref.WeakKeyDictionary()
"""In which variable of a loop of somebody's own its pipeline was, to look there first."""
_PLAIN = (
    torch.Tensor, str, int, float, list, tuple, dict, type(None), type, ModuleType, FunctionType
)  # fmt: skip
_SCHEDULER = "scheduler"


@dataclass(frozen=True, slots=True)
class DenoisingLoop:
    """What runs a denoiser.

    Attributes:
        name: what it calls the denoiser.
        schedulers: its schedulers by name.
        pipeline: the object that has both.
    """

    name: str
    schedulers: dict[str, Any]
    pipeline: object

    def scheduler(self) -> Any:  # noqa: ANN401
        """The scheduler that steps with the denoiser.

        That is the one with a part of its name (`prior_scheduler` of `prior_prior`), or of several
        the one that began a run last.
        """
        stems = {name.removesuffix(_SCHEDULER).rstrip("_"): name for name in self.schedulers}
        named = [s for s in stems if s and (self.name == s or self.name.startswith(f"{s}_"))]
        if named:
            return self.schedulers[stems[max(named, key=len)]]

        def began(name: str) -> tuple[int, bool]:
            run = run_of(self.schedulers[name])
            return (0 if run is None else run.number, name == _SCHEDULER)

        return self.schedulers[max(self.schedulers, key=began)]

    def announced(self) -> int | None:
        """How many steps a running method of the pipeline says that its loop has.

        What an earlier run left there does not count.
        """
        number = getattr(self.pipeline, ANNOUNCED, None)
        setters = (
            ANNOUNCED in frame.f_code.co_names
            for frame, candidate in _candidates(sys._getframe(1))
            if candidate is self.pipeline
        )
        return number if isinstance(number, int) and any(setters) else None


def loop_around(module: nn.Module) -> DenoisingLoop | None:
    """The innermost object whose method runs, that holds a module beside a scheduler, or `None`."""
    loops = (loop_of(candidate, module) for _, candidate in _candidates(sys._getframe(1)))
    return next((loop for loop in loops if loop is not None), None)


def loop_in_scope(module: nn.Module) -> DenoisingLoop | None:
    """The innermost caller among whose variables are the module and a scheduler, or one with both.

    For loops of somebody's own, among the `NEAR` innermost callers.
    """
    for code, scope in _scopes(sys._getframe(1)):
        loop = _loop_of([scope], scope, module) or loop_of(scope.get(_known.get(code, "")), module)
        if loop is not None:
            return loop
        for name, candidate in scope.items():
            if not isinstance(candidate, _PLAIN) and (loop := loop_of(candidate, module)):
                _known[code] = name
                return loop
    return None


def loop_of(pipeline: object, module: nn.Module) -> DenoisingLoop | None:
    """What an object knows of a module's steps: `None` unless it holds the module and a scheduler.

    Example:
        >>> loop_of(object(), nn.Linear(2, 2)) is None
        True
    """
    return _loop_of(list(_parts(pipeline)), pipeline, module)


def schedulers_of(pipeline: object) -> dict[str, Any]:
    """The schedulers of a pipeline by name, as far as they tell their steps."""
    return _schedulers(_parts(pipeline))


def _loop_of(
    named: Sequence[Mapping[str, Any]], pipeline: object, module: nn.Module
) -> DenoisingLoop | None:
    schedulers = _schedulers(named)
    if not schedulers:
        return None
    for parts in named:
        for name, part in parts.items():
            if isinstance(part, nn.Module) and _inside(part) is module:
                return DenoisingLoop(name, schedulers, pipeline)
    return None


def _schedulers(named: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: part
        for parts in named
        for name, part in parts.items()
        if name.endswith(_SCHEDULER) and counts_steps(part)
    }


def _scopes(frame: FrameType | None) -> Iterator[tuple[CodeType, dict[str, Any]]]:
    """The nearest callers that step something, with their variables, innermost caller first."""
    for code, near in itertools.islice(_frames(frame), NEAR):
        if "step" in code.co_names:
            own = {} if near.f_locals is near.f_globals else near.f_locals
            used = {name: near.f_globals[name] for name in code.co_names if name in near.f_globals}
            yield code, used | own


def _candidates(frame: FrameType | None) -> Iterator[tuple[FrameType, object]]:
    """Objects whose methods the callers run, or whose blocks."""
    for code, near in _frames(frame):
        arguments = code.co_varnames[: min(2, code.co_argcount)]
        if "self" in arguments[:1] or COMPONENTS in arguments:
            found = near.f_locals
            for name in arguments:
                candidate = found.get(name)
                if not isinstance(candidate, _PLAIN):
                    yield near, candidate


def _frames(frame: FrameType | None) -> Iterator[tuple[CodeType, FrameType]]:
    """The callers, innermost first; who asks one for its variables has reasons.

    Before Python 3.13 a running function keeps what `f_locals` gives, and shares it with `locals`.
    """
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_PASSED_OVER):
            yield frame.f_code, frame
        frame = frame.f_back


def _parts(pipeline: object) -> Iterator[Mapping[str, Any]]:
    """What an object holds by name, what it calls its components included."""
    own = getattr(pipeline, "__dict__", None)
    if not isinstance(own, dict):
        return
    yield own
    for name in ("components", "_modules"):
        if isinstance(further := own.get(name), dict):
            yield further


def _inside(module: nn.Module) -> nn.Module:
    """The module inside its wrappers."""
    while True:
        found = (module._modules.get(name) for name in WRAPPERS)
        inner = next((m for m in found if m is not None), None)
        if inner is None:
            return module
        module = inner
