"""What a policy is searched for, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sage_plugin.errors import UsageError
from sage_plugin.plugin.options.checked import MIN_SEQ
from sage_plugin.tune.configs.plan import RUNS
from sage_plugin.tune.run import run_folder


@dataclass(frozen=True, slots=True)
class PolicyRequest:
    """What is searched for.

    The fields are the options of `sage policy search`, with what `None` stands for.
    """

    folder: Path
    max_error: float | None = None
    max_ms: float | None = None
    max_layer_error: float = 0.15
    kernels: tuple[str, ...] = ()
    device: str | None = None
    config_dir: Path | None = None
    step_ranges: int = 5
    min_seq: int = MIN_SEQ
    captures_per_cell: int = 3
    times: tuple[Path, ...] = ()
    sensitivity: Path | None = None
    smoothing: Path | None = None
    runs_dir: Path = RUNS
    run_name: str | None = None
    fresh: bool = False

    def check(self) -> None:
        """See that the numbers can mean something.

        Raises:
            UsageError: one cannot; the sentence names the option.
        """
        if (self.max_error is None) == (self.max_ms is None):
            raise UsageError("give one of --max-error and --max-ms: what the policy has to keep")
        least = {
            "--max-error": self.max_error,
            "--max-ms": self.max_ms,
            "--max-layer-error": self.max_layer_error,
        }
        for option, value in least.items():
            if value is not None and not 0 < value < float("inf"):
                raise UsageError(f"{option} {value}: must be above 0")
        if self.min_seq < 1:
            raise UsageError(f"--min-seq {self.min_seq}: must be 1 or more")
        run_folder.check_name(self.run_name)
