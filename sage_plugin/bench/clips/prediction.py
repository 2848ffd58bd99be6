"""What a policy's search foresaw for a run, and whether the run is the one that it foresaw."""

from __future__ import annotations

from collections.abc import Iterator

from sage_plugin.bench.clips.run_config import Way
from sage_plugin.plugin.policy.rules import Foreseen, Policy, Prediction


def foreseen_saving(way: Way, host: Way, policy: Policy | None) -> float | None:
    """Milliseconds that a run was foreseen to save over the host's attention calls.

    Args:
        way: the way of running.
        host: the host's attention.
        policy: the policy whose search foresaw it.

    Returns:
        `None` where nothing was foreseen for one of them.
    """
    ours, theirs = way.foreseen(policy), host.foreseen(policy)
    return None if ours is None or theirs is None else theirs.ms - ours.ms


def parts(found: Foreseen | None) -> tuple[float | None, float | None]:
    """Foreseen milliseconds and error, `None` where nothing was foreseen."""
    return (None, None) if found is None else (found.ms, found.error)


def mismatches(prediction: Prediction | None, *, device: str, calls: int) -> Iterator[str]:
    """Why foreseen and real numbers do not belong together, a sentence each.

    Args:
        prediction: what was foreseen, `None` for nothing.
        device: name of the device of the real run.
        calls: attention calls of the real run.

    Example:
        >>> list(mismatches(Prediction("H100", 15, 60, ()), device="H100", calls=8))
        ['foreseen for a run of 60 attention calls, and this one has 8']
    """
    if prediction is None:
        return
    if prediction.device != device:
        yield f"foreseen on {prediction.device}, and this is {device}"
    if prediction.calls != calls:
        yield f"foreseen for a run of {prediction.calls} attention calls, and this one has {calls}"
