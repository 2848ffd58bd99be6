"""One way of running a pipeline's attention: the host's, a single kernel, or a policy."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sage_plugin.plugin.patch import MIN_SEQ, PatchHandle, patched
from sage_plugin.plugin.policy.rules import HOST, Foreseen, Policy

__all__ = ["HOST", "POLICY", "Way", "ways"]

POLICY = "policy"


@dataclass(frozen=True, slots=True)
class Way:
    """One way of running.

    Attributes:
        name: what tables call it.
        kernel: as `patch` takes it; `sdpa` is the host's attention. Not used beside a policy.
        policy: the policy, `None` for a single kernel.
    """

    name: str
    kernel: str = HOST
    policy: Policy | None = None

    @property
    def of_the_host(self) -> bool:
        """Whether it leaves the pipeline as it is."""
        return self.policy is None and self.kernel == HOST

    @contextlib.contextmanager
    def patched(
        self,
        pipe: object,
        *,
        min_seq: int = MIN_SEQ,
        config_dir: str | os.PathLike[str] | None = None,
    ) -> Iterator[PatchHandle]:
        """A pipeline that runs this way within a `with` block; errors are those of `patch`."""
        kernel = "auto" if self.policy is not None else self.kernel
        with patched(
            pipe, kernel=kernel, policy=self.policy, min_seq=min_seq, config_dir=config_dir
        ) as handle:
            yield handle

    def foreseen(self, policy: Policy | None) -> Foreseen | None:
        """What the search of a policy foresaw for this way, `None` where nothing."""
        if policy is None or policy.prediction is None:
            return None
        return policy.prediction.of(self.kernel if self.policy is None else POLICY)


def ways(kernels: Sequence[str], policy: Policy | None = None, *, host: str = HOST) -> list[Way]:
    """The host's attention first, each kernel once, and the policy last.

    Args:
        kernels: as `patch` takes them; one that has the host's name is the host's.
        policy: the policy, `None` for none.
        host: what tables call the host's attention.

    Example:
        >>> [way.name for way in ways(["sdpa", "sage", "sage"])]
        ['sdpa', 'sage']
    """
    singles = [Way(name, name) for name in dict.fromkeys(kernels) if name != host]
    return [Way(host), *singles, *([] if policy is None else [Way(POLICY, policy=policy)])]
