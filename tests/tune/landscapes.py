"""Made-up recorded runs: the spaces of real kernels, whose times and errors have a structure."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from pathlib import Path

from sage_plugin.kernels.attention import launch_space
from sage_plugin.schema import LaunchConfig, Timing, Trial
from sage_plugin.tune.run import run_folder
from sage_plugin.tune.run.ledger import Ledger
from sage_plugin.tune.search.search import RECIPE, TILE, TOO_LARGE
from tests.kernels.devices import facts
from tests.registry import samples

FREE = [name for name in LaunchConfig.__dataclass_fields__ if name not in TILE]
AXES = ("tile", *FREE)
SPACES = {
    "sage:portable sm_89": ("sage", "portable", "sm_89", 128),
    "fav3_sage:portable sm_89": ("fav3_sage", "portable", "sm_89", 64),
    "fav3_sage:hopper sm_90": ("fav3_sage", "hopper", "sm_90", 64),
    "fav3_fp8:portable gfx942": ("fav3_fp8", "portable", "gfx942", 128),
}


def space_of(name: str) -> tuple[LaunchConfig, ...]:
    """The configs that a search of a real kernel is given."""
    kernel, variant, arch, dim = SPACES[name]
    key = samples.key(kernel=kernel, variant=variant, head_dim=dim, dv=dim)
    return launch_space.candidates(key, facts(arch))


def values(config: LaunchConfig) -> dict[str, object]:
    """A config by axes."""
    tile = (config.block_m, config.block_n, config.num_warps)
    return {"tile": tile} | {name: getattr(config, name) for name in FREE}


def trials_of(
    space: tuple[LaunchConfig, ...], seed: int, *, noise: float = 0.005, study: str = "s"
) -> list[Trial]:
    """What an exhaustive search of a space might have written.

    The log of a time is a sum of effects of each value (4 % of a launch axis, 2 % of a recipe's),
    of pairs of values (1.5 %) and of the config itself (0.3 %), which no other config tells of.
    """
    order = random.Random(seed)
    single: dict[object, float] = {}
    pairs: dict[object, float] = {}

    def effect(known: dict[object, float], name: object, size: float) -> float:
        if name not in known:
            known[name] = order.gauss(0, size)
        return known[name]

    def log_time(config: LaunchConfig) -> float:
        own = values(config).items()
        total = sum(effect(single, pair, 0.02 if pair[0] in RECIPE else 0.04) for pair in own)
        couples = itertools.combinations(own, 2)
        launch = [c for c in couples if not {c[0][0], c[1][0]} & {*RECIPE}]
        return total + sum(effect(pairs, c, 0.015) for c in launch) + order.gauss(0, 0.003)

    base = log_time(space[0])
    found = []
    for config in space:
        ratio = 1.0 if config == space[0] else math.exp(log_time(config) - base)
        if config != space[0] and order.random() < 0.05:
            found.append(
                Trial(study, config, "screen", "compile_error", reason="OutOfResources",
                      extra={TOO_LARGE: 1.0 * (order.random() < 0.2)})
            )  # fmt: skip
            continue
        error = 0.02 * math.prod(
            1 + effect(single, ("error", name, getattr(config, name)), 0.1)
            for name in RECIPE
            if getattr(config, name) != getattr(space[0], name)
        )
        half = ratio * noise * 1.693 / 2
        found.append(
            Trial(
                study, config, "screen", "ok",
                time=Timing(ratio, ratio - half, ratio + half, 3, "events"),
                errors=dataclasses.replace(samples.ERRORS, centred_rel_l1=error),
                extra={"ratio": ratio},
            )
        )  # fmt: skip
    return found


def write(folder: Path, name: str, seed: int, *, noise: float = 0.005) -> Path:
    """A run folder that such a search might have left."""
    ledger = Ledger(None)
    for trial in trials_of(space_of(name), seed, noise=noise):
        ledger.append(trial)
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(trial.to_json()) for trial in ledger.all())
    (folder / run_folder.LEDGER).write_text("\n".join(lines) + "\n")
    kernel, variant, _, dim = SPACES[name]
    key = samples.key(kernel=kernel, variant=variant, head_dim=dim, dv=dim)
    study = {"id": "s", "key": key.to_json(), "gate": {"min_cosine": 0.9}}
    metadata = {
        "device": samples.FACTS.to_json(),
        "toolchain": samples.TOOLCHAIN.to_json(),
        "studies": [study],
    }
    (folder / run_folder.METADATA).write_text(json.dumps(metadata))
    return folder
