"""Which kernel each layer runs on at each denoising step: ordered rules, the first that fits wins.

A call that no rule fits stays with the host's attention.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sage_plugin import files
from sage_plugin.errors import ConfigError, UnknownKernelError, did_you_mean
from sage_plugin.kernels.attention.dispatch import parse_kernel
from sage_plugin.kernels.linear.rows.row_format import ROTATIONS
from sage_plugin.paged_records import PAGED_ATTENTION, PAGED_KERNELS
from sage_plugin.plugin.policy.step_range import Band
from sage_plugin.schema import (
    GROUPED_LINEAR,
    GROUPED_LINEAR_KERNELS,
    LINEAR_KERNELS,
    JsonRecord,
    LaunchConfig,
)

SCHEMA_VERSION = 1
MAX_FILE_BYTES = 4 * 2**20
KINDS = ("any", "self", "cross")
HOST = "sdpa"
ATTENTION, LINEAR = "attention", "linear"
BASELINE = "bf16"
"""The kernel of a rule that leaves a linear as it is."""
BASELINES = {ATTENTION: HOST, LINEAR: BASELINE, GROUPED_LINEAR: BASELINE}
"""What a call is left to, by op family."""
UNQUANTIZED = {**BASELINES, PAGED_ATTENTION: PAGED_KERNELS[0]}
"""The kernel of a rule that quantizes nothing, by every op family that rules may be of."""
LINEARS = (LINEAR, GROUPED_LINEAR)
"""Whose rules `patch` has for linears: those of grouped linears are of experts alone."""
TUNABLE = frozenset(spec.name for spec in fields(LaunchConfig))

MOST_RULES, LONGEST_GLOB = 1000, 300
"""Each rule is compared with those before it, and a glob with each layer."""

_OF_ATTENTION = ("steps", "attention", "min_seq", "launch")

ANY_CONFIG = LaunchConfig(64, 64, 4, 2, "pointer", True, True, 1)
"""Whose fields a rule may change; what is legal depends on the call."""


@dataclass(frozen=True, slots=True)
class Rule(JsonRecord):
    """One line of a policy.

    Attributes:
        kernel: `sdpa` for the host's attention, `auto`, or a kernel, also as `kernel:variant`.
        layers: globs of layer paths, with or without the component in front.
        steps: a band of denoising steps (`step_range.py`), empty for all.
        attention: `"self"` (as many queries as keys), `"cross"`, or `"any"`.
        min_seq: fewest queries and keys.
        launch: fields of the launch config that are changed.
        saved_ms: predicted milliseconds that the rule saves a run, `None` where nobody predicted.
        error: predicted error of its worst call.
        captures: captures that the predictions rest on.
        rotation: of a rule of linears, most input channels of a block that is rotated (QuaRot): a
            linear takes the largest block that divides its channels; 0 for none.
        smoothing: of a rule of linears, whether channels are divided by the factors of the policy's
            file (SmoothQuant).
        op: `"attention"`, `"linear"` for linear layers and experts, `"grouped_linear"` for experts
            alone, or `"paged_attention"` for `continuous_batching`. All but attention have one
            kernel for all steps, of `KERNELS_OF`, or `auto`.
    """

    kernel: str
    layers: tuple[str, ...] = ("*",)
    steps: str = ""
    attention: str = "any"
    min_seq: int = 0
    launch: dict[str, Any] = field(default_factory=dict)
    saved_ms: float | None = None
    error: float | None = None
    captures: tuple[str, ...] = ()
    op: str = ATTENTION
    rotation: int = 0
    smoothing: bool = False

    @property
    def label(self) -> str:
        """Its kernel, with what a linear does to channels before it: `int8_row+rotation=64`."""
        rotation = f"+rotation={self.rotation}" if self.rotation else ""
        return f"{self.kernel}{rotation}{'+smoothing=true' if self.smoothing else ''}"

    @property
    def band(self) -> Band:
        """Its steps."""
        return Band.parse(self.steps)

    def names(self, layer: str) -> bool:
        """Whether its globs choose a layer, by its path with the component in front."""
        return _matches(tuple(self.layers), layer)

    def fits(self, seq_q: int, seq_k: int) -> bool:
        """Whether it takes calls of these lengths."""
        if seq_q < self.min_seq or seq_k < self.min_seq:
            return False
        return self.attention == "any" or (self.attention == "self") == (seq_q == seq_k)

    def hides(self, later: Rule) -> bool:
        """Whether nothing is left for a later rule."""
        return (
            (self.op, later.op) in _HIDING
            and ("*" in self.layers or set(later.layers) <= set(self.layers))
            and self.band.covers(later.band)
            and self.attention in ("any", later.attention)
            and self.min_seq <= later.min_seq
        )


KERNELS_OF = {
    LINEAR: LINEAR_KERNELS, GROUPED_LINEAR: GROUPED_LINEAR_KERNELS, PAGED_ATTENTION: PAGED_KERNELS,
}  # fmt: skip
"""What rules may name besides `auto`, of ops that have a kernel for all steps."""

_HIDING = {(op, op) for op in UNQUANTIZED} | {(LINEAR, GROUPED_LINEAR)}
"""Whose rules take the calls of whose: experts are linears too."""


@functools.lru_cache(maxsize=65_536)
def _matches(globs: tuple[str, ...], layer: str) -> bool:
    """Asked at every call of every layer, with the same few answers."""
    bare = layer.partition(".")[2]
    return any(fnmatchcase(layer, glob) or fnmatchcase(bare, glob) for glob in globs)


@dataclass(frozen=True, slots=True)
class PredictedRun(JsonRecord):
    """What the calls of a run are predicted to come to, with one kernel or the policy.

    Attributes:
        name: a kernel by name, `sdpa` for the model as it is, or `policy`.
        ms: milliseconds of all calls of the searched op families, with quantisation.
        error: mean over all calls of the centred relative L1 error; 0 for the model as it is.
    """

    name: str
    ms: float
    error: float


@dataclass(frozen=True, slots=True)
class Prediction(JsonRecord):
    """What was predicted for a policy when it was searched.

    Attributes:
        device: name of the device whose times these are.
        steps: denoising steps of the run, `None` where none were counted.
        calls: attention calls of the run; 0 where linears alone were searched.
        runs: the model as it is first, then each kernel by itself, and the policy last.
    """

    device: str
    steps: int | None
    calls: int
    runs: tuple[PredictedRun, ...]

    def of(self, name: str) -> PredictedRun | None:
        """Return what was predicted for one run, `None` if nothing was."""
        return next((run for run in self.runs if run.name == name), None)


@dataclass(frozen=True, slots=True)
class Policy(JsonRecord):
    """A policy file.

    Attributes:
        schema_version: `SCHEMA_VERSION` of the writer.
        rules: the first that fits a call decides.
        model: class of the model that it was made for, empty for any.
        note: a sentence for people.
        prediction: what its search predicted, `None` if it was not searched.
        smoothing: file of smoothing factors for the rules that smooth; of a policy that was read,
            relative to its file.
    """

    schema_version: int
    rules: tuple[Rule, ...]
    model: str = ""
    note: str = ""
    prediction: Prediction | None = None
    smoothing: str = ""

    @property
    def smooths(self) -> bool:
        """Whether a rule needs factors of smoothing."""
        return any(rule.smoothing for rule in self.rules)

    @property
    def needs_total(self) -> bool:
        """Whether the number of denoising steps has to be known."""
        return any(rule.band.needs_total for rule in self.rules)

    @property
    def needs_steps(self) -> bool:
        """Whether denoising steps have to be counted."""
        return any(rule.steps for rule in self.rules)

    def text(self) -> str:
        """The file, without what is left at its default."""
        rules = [_without_defaults(rule) for rule in self.rules]
        prediction = None if self.prediction is None else self.prediction.to_json()
        head = {
            "schema_version": self.schema_version,
            "model": self.model,
            "note": self.note,
            "prediction": prediction,
            "smoothing": self.smoothing,
        }
        lines = ",\n".join(f"  {json.dumps(rule)}" for rule in rules)
        body = ", ".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items() if v)
        return f'{{{body}, "rules": [\n{lines}\n]}}\n'


PRESETS = {
    "fast": (Rule("auto", attention="self", min_seq=1024),),
    "balanced": (
        Rule("sage", steps=":10%", attention="self", min_seq=1024),
        Rule("sage", steps="90%:", attention="self", min_seq=1024),
        Rule("auto", attention="self", min_seq=1024),
    ),
    "safe": (
        Rule(HOST, steps=":10%"),
        Rule(HOST, layers=("*blocks.0.*",)),
        Rule("sage", attention="self", min_seq=1024),
    ),
}
"""Rules of thumb, not measured on any model: the first steps lay a picture out, the last finish it,
and the first block feeds all others. None touches cross attention or short calls."""


def chosen(policy: str | os.PathLike[str] | Policy) -> Policy:
    """A policy from a preset's name, a file, or one that was made in Python.

    Raises:
        ConfigError: there is no such file or preset, or it is no sound policy.

    Example:
        >>> [rule.kernel for rule in chosen("balanced").rules]
        ['sage', 'sage', 'auto']
    """
    if isinstance(policy, Policy):
        return checked(policy, "policy")
    if not isinstance(policy, str | os.PathLike):
        raise ConfigError(
            f"policy is {type(policy).__name__}; give a file, one of {', '.join(PRESETS)}, or a "
            "sage_plugin.plugin.policy.rules.Policy"
        )
    if isinstance(policy, str) and policy in PRESETS:
        return Policy(SCHEMA_VERSION, PRESETS[policy])
    path = Path(os.path.expanduser(policy))
    if not os.path.isfile(path):
        raise ConfigError(
            f"policy {os.fspath(policy)!r} is neither a file nor one of {', '.join(PRESETS)}"
            f"{did_you_mean(os.fspath(policy), PRESETS)}"
        )
    return read(path)


def is_policy(path: Path) -> bool:
    """Whether a file is a policy, sound or not, by what it holds.

    Example:
        >>> is_policy(Path("no such file"))
        False
    """
    try:
        data = files.read_json(path, MAX_FILE_BYTES, "policy")
    except ConfigError:
        return False
    return isinstance(data, dict) and "rules" in data


def was_searched(path: Path) -> bool:
    """Return whether `sage policy search` wrote a policy, and not a person."""
    data = files.read_json(path, MAX_FILE_BYTES, "policy")
    return isinstance(data, dict) and data.get("prediction") is not None


def read(path: Path) -> Policy:
    """Read a policy file.

    Raises:
        ConfigError: it cannot be read, or is no sound policy; the sentence names file and rule.
    """
    data = files.read_json(path, MAX_FILE_BYTES, "policy")
    if isinstance(data, dict) and data.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: schema version {data.get('schema_version')!r}; this release reads "
            f"{SCHEMA_VERSION}"
        )
    if isinstance(data, dict) and isinstance(data.get("rules"), list):
        _bound(len(data["rules"]), str(path))
    try:
        policy = Policy.from_json(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if policy.smoothing:
        beside = path.parent / Path(policy.smoothing).expanduser()
        policy = dataclasses.replace(policy, smoothing=str(beside))
    return checked(policy, str(path))


def checked(policy: Policy, where: str) -> Policy:
    """A policy whose every rule can mean something.

    Args:
        policy: the policy.
        where: what the error names.

    Raises:
        ConfigError: an unknown kernel or field, a band that is none, a rule that others hide.
    """
    _bound(len(policy.rules), where)
    for problem in problems(policy.rules):
        raise ConfigError(f"{where}: {problem}")
    return policy


def _bound(count: int, where: str) -> None:
    """Refuse a number of rules that would take seconds to read.

    Raises:
        ConfigError: there are too many.
    """
    if count > MOST_RULES:
        raise ConfigError(
            f"{where}: more than {MOST_RULES} rules; join those that differ in their layers alone"
        )


def problems(rules: Iterable[Rule]) -> Iterator[str]:
    """What is wrong with rules, a sentence each."""
    before: list[tuple[int, Rule]] = []
    found = False
    for number, rule in enumerate(rules, start=1):
        found = True
        wrong = _wrong_with(rule)
        if wrong:
            yield f"rule {number}: {wrong}"
            continue
        for earlier, other in before:
            if other.hides(rule):
                yield f"rule {number} never fits a call, since rule {earlier} takes all of them"
                break
        before.append((number, rule))
    if not found:
        yield "no rules; a policy has one or more"


def _wrong_with(rule: Rule) -> str:
    if wrong := _wrong_kernel(rule):
        return wrong
    if not rule.layers or not all(rule.layers):
        return "layers are empty; leave them out for all"
    if longest := next((glob for glob in rule.layers if len(glob) > LONGEST_GLOB), None):
        return f"layers has {longest[:40]!r}..., which is longer than {LONGEST_GLOB} characters"
    if rule.attention not in KINDS:
        return f"attention is {rule.attention!r}; choose one of {', '.join(KINDS)}"
    if rule.min_seq < 0:
        return f"min_seq is {rule.min_seq}; it is a number of tokens, 0 or more"
    if unknown := sorted(set(rule.launch) - TUNABLE):
        return f"launch has no field {unknown[0]!r}; it has {', '.join(sorted(TUNABLE))}"
    try:
        ANY_CONFIG.replaced(**rule.launch)
    except ConfigError as error:
        return f"launch: {error}"
    if rule.launch and rule.kernel in ("auto", HOST, "torch"):
        return f"launch belongs to a kernel by name, and the kernel is {rule.kernel!r}"
    try:
        Band.parse(rule.steps)
    except ConfigError as error:
        return str(error)
    return ""


def _wrong_kernel(rule: Rule) -> str:
    if (rule.rotation or rule.smoothing) and (rule.op != LINEAR or rule.kernel == BASELINE):
        return (
            f"{'rotation' if rule.rotation else 'smoothing'} belongs to rules of linears that are "
            f"quantized, and this one is of {rule.op} with kernel {rule.kernel!r}"
        )
    if rule.rotation not in ROTATIONS:
        return f"rotation is {rule.rotation}; choose one of {', '.join(map(str, ROTATIONS))}"
    if rule.op == ATTENTION:
        if rule.kernel != "auto":
            try:
                parse_kernel(rule.kernel)
            except UnknownKernelError as error:
                return str(error)
        return ""
    if rule.op not in KERNELS_OF:
        return f"op is {rule.op!r}; choose one of {', '.join(UNQUANTIZED)}"
    if rule.steps:
        why = (
            "a server has no denoising steps"
            if rule.op == PAGED_ATTENTION
            else "a linear has one weight for all steps, so that the other need not be on its "
            "device"
        )
        return (
            f"steps are {rule.steps!r}, and {why}; leave steps out, or the layers as they are "
            f"({UNQUANTIZED[rule.op]})"
        )
    plain = Rule(rule.kernel, op=rule.op)
    of_attention = (n for n in _OF_ATTENTION if getattr(rule, n) != getattr(plain, n))
    if field_name := next(of_attention, None):
        return f"{field_name} belongs to rules of attention, and this one is of {rule.op}"
    if rule.kernel not in ("auto", *KERNELS_OF[rule.op]):
        return f"kernel {rule.kernel!r} of {rule.op}; choose one of auto, " + ", ".join(
            KERNELS_OF[rule.op]
        )
    return ""


def _without_defaults(rule: Rule) -> dict[str, Any]:
    plain = Rule(rule.kernel).to_json()
    return {k: v for k, v in rule.to_json().items() if k == "kernel" or v != plain[k]}
