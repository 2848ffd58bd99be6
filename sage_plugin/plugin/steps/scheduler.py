"""The runs of a scheduler: `set_timesteps` begins one, and each `step` ends one step of it.

So guidance may take one forward a step or two, and a pipeline may have one transformer or two. A
watched scheduler becomes an instance of a subclass that counts; copies and pickles of it do not.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from sage_plugin.kernels.fallback import Fallback

ORIGINAL = "_sage_original"
RUN = "_sage_run"

_classes: dict[type, type] = {}
_numbers = itertools.count(1)
_lock = threading.Lock()
_owners: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
"""Who watches a scheduler; the last one to leave puts its class back."""


class Run(NamedTuple):
    """One run of a scheduler; a value, since some pipelines copy and restore what schedulers hold.

    Attributes:
        number: greater than that of each run that began before.
        thread: the thread in which it began.
        steps: calls of `step` since.
        total: steps that it has, `None` until somebody found out.
        unknown: why its steps cannot be told, `None` where they can.
    """

    number: int
    thread: int
    steps: int = 0
    total: int | None = None
    unknown: Fallback | None = None


def counts_steps(scheduler: object) -> bool:
    """Whether an object is a scheduler that tells its steps.

    Example:
        >>> counts_steps(object())
        False
    """
    return callable(getattr(scheduler, "step", None)) and callable(
        getattr(scheduler, "set_timesteps", None)
    )


def watch(scheduler: Any, owner: object) -> bool:  # noqa: ANN401
    """Count the steps of a scheduler from here on.

    Where it is in the middle of a run, its own account is taken, if it has one.

    Returns:
        Whether its steps were not counted before.

    Raises:
        TypeError: its class cannot be exchanged.
    """
    with _lock:
        own, met = vars(scheduler), False
        owners = _owners.setdefault(scheduler, weakref.WeakSet())
        if RUN not in own:
            scheduler.__class__ = _counting(_original(scheduler))
            own[RUN], met = _own_account(scheduler), True
        owners.add(owner)
    return met


def release(scheduler: Any, owner: object) -> None:  # noqa: ANN401
    """Leave a scheduler as it was, unless somebody else watches it."""
    with _lock:
        owners = _owners.get(scheduler)
        if owners is None:
            return
        owners.discard(owner)
        if not owners:
            del _owners[scheduler]
            scheduler.__class__ = _original(scheduler)
            vars(scheduler).pop(RUN, None)


def run_of(scheduler: object) -> Run | None:
    """The run of a watched scheduler, `None` before its first one."""
    run: Run | None = getattr(scheduler, "__dict__", {}).get(RUN)
    return run


def note(scheduler: object, run: Run) -> Run:
    """Keep what was found out about a run."""
    vars(scheduler)[RUN] = run
    return run


def position_of(timestep: float | None, scheduler: object) -> int | None:
    """Where a timestep stands among those of a scheduler, first of equal ones."""
    timesteps = getattr(scheduler, "timesteps", None)
    if timestep is None or timesteps is None:
        return None
    values = [float(t) for t in timesteps]
    return values.index(timestep) if timestep in values else None


def steps_left(scheduler: object) -> int | None:
    """How many steps a scheduler has from where a run begins, `None` before that is set."""
    timesteps = getattr(scheduler, "timesteps", None)
    if timesteps is None:
        return None
    return len(timesteps) - (getattr(scheduler, "begin_index", None) or 0)


def _own_account(scheduler: Any) -> Run | None:  # noqa: ANN401
    """The run that a scheduler is in, by what it knows itself."""
    run = Run(next(_numbers), threading.get_ident())
    index, counter = getattr(scheduler, "step_index", None), getattr(scheduler, "counter", None)
    if index is not None:
        return run._replace(steps=index - (getattr(scheduler, "begin_index", None) or 0))
    if getattr(scheduler, "num_inference_steps", None) is None:
        return None
    if counter is not None or hasattr(scheduler, "step_index"):
        return run._replace(steps=counter or 0)
    return run._replace(unknown=Fallback.STEP_MET_MIDWAY)


def _original(scheduler: object) -> type:
    original: type = getattr(type(scheduler), ORIGINAL, type(scheduler))
    return original


def _counting(original: type) -> type:
    """The subclass of a scheduler's class that counts; made once a class."""
    if original not in _classes:
        namespace = {
            "__new__": _new_original,
            "step": _after(original.step, _ended),  # type: ignore[attr-defined]
            "set_timesteps": _after(original.set_timesteps, _begun),  # type: ignore[attr-defined]
            "__reduce_ex__": _reduce_as_original,
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            ORIGINAL: original,
        }
        _classes[original] = type(original)(original.__name__, (original,), namespace)
    return _classes[original]


def _after(method: Callable[..., Any], then: Callable[[Any], None]) -> Callable[..., Any]:
    # `wraps` matters: pipelines look at the parameters of `step`.
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        result = method(self, *args, **kwargs)
        then(self)
        return result

    return call


def _ended(scheduler: Any) -> None:  # noqa: ANN401
    run = run_of(scheduler)
    if run is not None:
        note(scheduler, run._replace(steps=run.steps + 1))


def _begun(scheduler: Any) -> None:  # noqa: ANN401
    if RUN in vars(scheduler):
        note(scheduler, Run(next(_numbers), threading.get_ident()))


def _new_original(cls: type, *args: Any, **kwargs: Any) -> object:  # noqa: ANN401
    """What `type(scheduler)(...)` or its `from_config` makes of a watched one is a plain one."""
    original: type = getattr(cls, ORIGINAL)
    return original(*args, **kwargs)


def _reduce_as_original(self: object, protocol: object) -> tuple[Any, ...]:
    """A copy or a pickle of a watched scheduler is a plain one."""
    state = {key: value for key, value in vars(self).items() if key != RUN}
    return object.__new__, (_original(self),), state
