"""One tuning problem, and the hash under which its trials are kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field

from sage_plugin.accuracy.gate import Gate
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.schema import (
    AnyKey,
    AnyLaunch,
    DeviceFacts,
    JsonRecord,
    Toolchain,
)

LARGE_SPACE, LARGE_SCREEN_ROUNDS = 1000, 5
"""Configs of a space that counts as large, and the rounds of its screen."""


@dataclass(frozen=True, slots=True)
class Timer(JsonRecord):
    """How candidates are timed; part of the study, since times of two timers are never compared.

    Attributes:
        method: a method of `measure.timing`.
        screen_rounds: interleaved rounds of a batch of candidates and the default in the screen.
        screen_s: longest screen, in seconds for each candidate of the batch.
        race_rounds: interleaved rounds after which finalists that cannot be told apart are equals.
        race_s: longest race, in seconds.
    """

    method: str
    screen_rounds: int = 3
    screen_s: float = 2.0
    race_rounds: int = 40
    race_s: float = 30.0

    def of_space(self, configs: int) -> Timer:
        """Return the timer for a space of so many configs.

        Of a large one a small part is tried, the neighbors of the best: noise leads it astray.
        """
        more = LARGE_SCREEN_ROUNDS if configs > LARGE_SPACE else 0
        return dataclasses.replace(self, screen_rounds=max(self.screen_rounds, more))


@dataclass(frozen=True, slots=True)
class Problem:
    """What a process needs to judge and time configs: a study without its space, for every job.

    Attributes are those of `Study`.
    """

    id: str
    key: AnyKey
    sources: tuple[ReplayInputs, ...]
    timed: ReplayInputs
    gate: Gate
    timer: Timer
    device: str
    facts: DeviceFacts


@dataclass(frozen=True, slots=True)
class Study:
    """Everything that a trial's result depends on.

    Attributes:
        key: the call, with the kernel and variant that are tuned.
        sources: inputs on which every candidate is judged.
        timed: the one of them that is timed.
        space: configs to search, the default first.
        gate: accuracy limits.
        timer: how to time.
        device: torch's name of the device.
        facts: identity and limits of the device.
        toolchain: versions that times and errors depend on.
        id: hash of everything else but the device's number: equal for the same command again,
            different for any change. The place of a capture folder is not part of it, the checksums
            of its files are.
    """

    key: AnyKey
    sources: tuple[ReplayInputs, ...]
    timed: ReplayInputs
    space: tuple[AnyLaunch, ...]
    gate: Gate
    timer: Timer
    device: str
    facts: DeviceFacts
    toolchain: Toolchain
    id: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Hash the study once: its space may have thousands of configs."""
        parts = [
            self.key.to_json(),
            [(source.label, source.shape.to_json()) for source in self.sources],
            self.timed.label,
            [config.to_json() for config in self.space],
            self.gate.to_json(),
            self.timer.to_json(),
            self.facts.to_json(),
            self.toolchain.to_json(),
        ]
        object.__setattr__(self, "id", digest(parts))

    @property
    def problem(self) -> Problem:
        """What a process needs of it."""
        return Problem(
            self.id, self.key, self.sources, self.timed, self.gate, self.timer, self.device,
            self.facts,
        )  # fmt: skip

    @property
    def default(self) -> AnyLaunch:
        """The config that a winner has to beat."""
        return self.space[0]

    @property
    def synthetic(self) -> bool:
        """Whether the inputs are drawn, not recorded."""
        return any(source.synthetic for source in self.sources)

    @property
    def kernel(self) -> str:
        """`kernel:variant`, as reports show it."""
        return f"{self.key.kernel}:{self.key.variant}"


def digest(value: object) -> str:
    """Return sixteen hex digits of the SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
