"""Configs that somebody believes in, measured again: each against the default and its gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sage_plugin.errors import CaptureError
from sage_plugin.families import describe, family
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.schema import AnyEntry, AnyShape
from sage_plugin.tune.configs import plan as plans
from sage_plugin.tune.configs.inputs import InputGroup, TuningInputs, shape_key
from sage_plugin.tune.configs.plan import TuningPlan, TuningRequest
from sage_plugin.tune.configs.space_file import SpaceFile, Value
from sage_plugin.tune.run.study import digest


@dataclass(frozen=True, slots=True)
class Believed:
    """A config to measure again.

    Attributes:
        kernel: `kernel` or `kernel:variant`.
        shape: the call.
        fields: fields of the launch config; those that are missing are the default's.
        source: what says so, for notes.
        of_captures: only recorded inputs can take its place.
    """

    kernel: str
    shape: AnyShape
    fields: Mapping[str, Value]
    source: str
    of_captures: bool = False


def held(entry: AnyEntry, source: str) -> Believed:
    """Return what a registry entry holds."""
    label = f"{entry.key.kernel}:{entry.key.variant}"
    fields = entry.config.to_json()
    shape = family(entry.key.family).shape_of(entry.key)
    return Believed(label, shape, fields, source, not entry.evidence.synthetic)


def build(
    believed: Sequence[Believed], request: TuningRequest, name: str = "revalidate"
) -> TuningPlan:
    """Plan a session of one study for each config: itself and the default."""
    built, notes = [], list(request.inputs.notes)
    run = f"{name}-{digest([(b.kernel, b.shape.to_json(), dict(b.fields)) for b in believed])[:8]}"
    for one in believed:
        group = _group(one, request.inputs)
        if group is None:
            what = f"{one.kernel} {describe(one.shape)}"
            notes.append(f"{what}: tuned on captures, and none of such a call were given")
            continue
        axes = tuple((field, (value,)) for field, value in one.fields.items())
        try:
            built.append(
                plans.build(
                    dataclasses.replace(
                        request,
                        inputs=TuningInputs((group,)),
                        kernels=(one.kernel,),
                        space=SpaceFile(Path(one.source), axes),
                        run_name=request.run_name or run,
                        family=family(one.shape.family),
                        fresh=True,
                    )
                )
            )
        except CaptureError as error:
            notes.append(str(error))
    if not built:
        reasons = "; ".join(dict.fromkeys(notes)) or "there are no configs"
        raise CaptureError(f"nothing can be measured again: {reasons}")
    studies = {study.key: (study, plan) for plan in built for study in plan.studies}
    notes += [note for plan in built for note in plan.notes]
    return dataclasses.replace(
        built[0],
        studies=tuple(study for study, _ in studies.values()),
        calls=tuple(plan.calls[0] for _, plan in studies.values()),
        notes=tuple(dict.fromkeys(notes)),
    )


def _group(one: Believed, captured: TuningInputs) -> InputGroup | None:
    """Captures of the very call if there are any, else drawn inputs where those may do."""
    wanted = shape_key(one.shape)
    for group in captured.groups:
        if shape_key(group.shape) == wanted:
            return group
    drawn = ReplayInputs(one.shape, describe(one.shape))
    return None if one.of_captures else InputGroup((drawn,), drawn)
