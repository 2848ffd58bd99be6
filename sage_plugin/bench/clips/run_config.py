"""What a pipeline's attention runs on: the baseline (the library's), a kernel, or a policy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sage_plugin.plugin.patch import MIN_SEQ, PatchHandle, patched
from sage_plugin.plugin.policy.rules import HOST, Policy, PredictedRun, Prediction

POLICY = "policy"


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One way to run a pipeline.

    Attributes:
        name: what tables call it.
        kernel: as `patch` takes it; `sdpa` is the baseline. Not used beside a policy.
        policy: the policy, `None` for a single kernel.
    """

    name: str
    kernel: str = HOST
    policy: Policy | None = None

    @property
    def is_baseline(self) -> bool:
        """Whether it leaves the pipeline as it is."""
        return self.policy is None and self.kernel == HOST

    def patched(
        self,
        pipe: object,
        *,
        min_seq: int = MIN_SEQ,
        config_dir: str | os.PathLike[str] | None = None,
    ) -> contextlib.AbstractContextManager[PatchHandle]:
        """Patch a pipeline for this run within a `with` block; errors are those of `patch`."""
        kernel = "auto" if self.policy is not None else self.kernel
        return patched(
            pipe, kernel=kernel, policy=self.policy, min_seq=min_seq, config_dir=config_dir
        )

    def predicted(self, policy: Policy | None) -> PredictedRun | None:
        """Return what the search of a policy predicted for this run, `None` if nothing."""
        if policy is None or policy.prediction is None:
            return None
        return policy.prediction.of(self.kernel if self.policy is None else POLICY)


def run_configs(
    kernels: Sequence[str], policy: Policy | None = None, *, baseline: str = HOST
) -> list[RunConfig]:
    """List the baseline first, each kernel once, and the policy last."""
    singles = [RunConfig(name, name) for name in dict.fromkeys(kernels) if name != baseline]
    policies = [] if policy is None else [RunConfig(POLICY, policy=policy)]
    return [RunConfig(baseline), *singles, *policies]


def mismatches(prediction: Prediction | None, *, device: str, calls: int) -> Iterator[str]:
    """Yield a sentence for each reason why predicted and real numbers do not belong together."""
    if prediction is None:
        return
    if prediction.device != device:
        yield f"predicted for {prediction.device}, and this is {device}"
    if prediction.calls and prediction.calls != calls:
        yield f"predicted for a run of {prediction.calls} attention calls, and this one has {calls}"
