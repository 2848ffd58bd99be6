"""Which denoising step a pipeline is at, as its scheduler tells: one `step()` of it ends one.

So guidance may take one forward a step or two, and a pipeline may have one transformer or two. The
scheduler becomes an instance of a subclass that counts; copies and pickles of it do not.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

ORIGINAL = "_sage_original"
COUNT = "_sage_step"

_classes: dict[type, type] = {}


class StepClock:
    """The steps of one pipeline.

    Args:
        pipeline: has a `scheduler` with `set_timesteps` and `step`; it is not kept alive.

    Example:
        >>> from diffusers import DDIMScheduler
        >>> class Pipeline:
        ...     scheduler = DDIMScheduler()
        >>> pipeline = Pipeline()
        >>> clock = StepClock(pipeline)
        >>> pipeline.scheduler.set_timesteps(5)
        >>> clock.now()
        (0, 5)
    """

    def __init__(self, pipeline: object) -> None:
        self._pipeline = weakref.ref(pipeline)
        self._watched: list[Any] = []
        self.now()

    def now(self) -> tuple[int, int | None]:
        """The step, from 0, and how many there are, `None` before that is set.

        A scheduler that was exchanged is watched from here on; where it is in the middle of a run,
        its own account is taken, if it has one.
        """
        scheduler = getattr(self._pipeline(), "scheduler", None)
        if scheduler is None:
            return 0, None
        if COUNT not in vars(scheduler):
            _watch(scheduler)
            self._watched.append(scheduler)
        timesteps = getattr(scheduler, "timesteps", None)
        total = None if timesteps is None else len(timesteps)
        return vars(scheduler)[COUNT], total

    def stop(self) -> None:
        """Leave all schedulers as they were."""
        for scheduler in self._watched:
            scheduler.__class__ = _original(scheduler)
            vars(scheduler).pop(COUNT, None)
        self._watched.clear()


def counts_steps(obj: object) -> bool:
    """Whether an object has a scheduler that tells its steps.

    Example:
        >>> counts_steps(object())
        False
    """
    scheduler = getattr(obj, "scheduler", None)
    return callable(getattr(scheduler, "step", None)) and callable(
        getattr(scheduler, "set_timesteps", None)
    )


def _watch(scheduler: Any) -> None:  # noqa: ANN401
    scheduler.__class__ = _counting(_original(scheduler))
    vars(scheduler)[COUNT] = getattr(scheduler, "step_index", None) or 0


def _original(scheduler: object) -> type:
    original: type = getattr(type(scheduler), ORIGINAL, type(scheduler))
    return original


def _counting(original: type) -> type:
    """The subclass of a scheduler's class that counts; made once a class."""
    if original not in _classes:
        namespace = {
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
    own = vars(scheduler)
    own[COUNT] = own.get(COUNT, 0) + 1


def _begun(scheduler: Any) -> None:  # noqa: ANN401
    vars(scheduler)[COUNT] = 0


def _reduce_as_original(self: object, protocol: object) -> tuple[Any, ...]:
    """A copy or a pickle of a watched scheduler is a plain one."""
    state = {key: value for key, value in vars(self).items() if key != COUNT}
    return object.__new__, (_original(self),), state
