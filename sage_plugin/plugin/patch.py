"""`patch`, `refresh`, `unpatch` and `patched`: a model's attention on our kernels, and back.

Nothing outside the chosen denoisers is touched: not `F.scaled_dot_product_attention`, not the
process-wide attention backend of diffusers, no autoencoder, no text encoder.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Literal, Self, overload

from torch import nn

from sage_plugin.errors import ConfigError, PatchError
from sage_plugin.plugin import policy_op as routed
from sage_plugin.plugin.component import Component, lock
from sage_plugin.plugin.context import LayerContext, Listener, PatchOptions, PatchState
from sage_plugin.plugin.hosts.diffusers import choose
from sage_plugin.plugin.options.checked import MIN_SEQ, checked_options
from sage_plugin.plugin.owners import modules_of, part_of, parts_of
from sage_plugin.plugin.plan.run_plan import RunPlan, plan_of
from sage_plugin.plugin.policy.fit import fitting_rules
from sage_plugin.plugin.policy.rules import ATTENTION, LINEAR, Policy
from sage_plugin.plugin.report import PluginReport, joined, report_of
from sage_plugin.plugin.steps.caller import schedulers_of
from sage_plugin.plugin.steps.tracker import StepTracker
from sage_plugin.schema import GROUPED_LINEAR

logger = logging.getLogger(__name__)

__all__ = [
    "MIN_SEQ",
    "InnerHandle",
    "PatchHandle",
    "handle_of",
    "patch",
    "patched",
    "refresh",
    "unpatch",
]


class PatchHandle:
    """A patch that is in place: undo it, ask it what happened, or use it in a `with` statement.

    Attributes:
        listeners: functions that get a `CallEvent` before each attention call, in eager mode only.
    """

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self._parts: list[Component] = []
        self._past: list[PluginReport] = []
        self._tracker: StepTracker | None = None

    @property
    def components(self) -> dict[str, nn.Module]:
        """The patched modules by name, those that there are still; empty after `unpatch`."""
        return {p.state.component: module for p in self._parts if (module := p.module) is not None}

    @property
    def layers(self) -> dict[str, LayerContext]:
        """The patched layers by module path, with the component in front."""
        return {x.name: x for part in self._parts for x in part.layers.values()}

    def unpatch(self) -> None:
        """Put everything back; again does nothing."""
        self._release(list(self._parts))

    @overload
    def report(self, *, plan: Literal[False] = False) -> PluginReport: ...
    @overload
    def report(self, *, plan: Literal[True]) -> RunPlan: ...

    def report(self, *, plan: bool = False) -> PluginReport | RunPlan:
        """What the layers did so far; after `unpatch`, what they had done by then.

        Args:
            plan: tell what they will run on instead, by the models' configurations.
        """
        if plan:
            return plan_of(self._parts)
        return report_of(self._parts) if self._parts else joined(self._past)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.unpatch()

    def __repr__(self) -> str:
        names = ", ".join(self.components) or "nothing"
        linears = sum(len(part.linears.layers) for part in self._parts)
        experts = sum(len(part.experts.layers) for part in self._parts)
        told = f", {linears} linears" if linears else ""
        told += f", experts of {experts} layers" if experts else ""
        return f"<PatchHandle of {names}, {len(self.layers)} attention layers{told}>"

    def _take(self, name: str, module: nn.Module, options: PatchOptions) -> Component:
        """The part of a module: a new one, or the one that it has, under this name and handle."""
        part = part_of(module)
        if part is None:
            part = Component(module, PatchState(name, options, self.listeners), self)
        elif part.handle is not self:
            part.handle._parts.remove(part)
        if part.module not in set(module.modules()):  # it was patched through a wrapper
            part.move(module)
        if not self._parts:
            self._past = []
        if part not in self._parts:
            self._parts.append(part)
        part.handle, part.state.listeners = self, self.listeners
        if part.module is module:
            part.rename(name)
        return part

    def _release(self, parts: list[Component]) -> None:
        with lock:
            parts = [part for part in parts if part in self._parts]  # no other thread did
            for part in parts:
                part.linears.check_originals()
                part.experts.check_originals()
            self._past.append(report_of(parts))
            for part in parts:
                part.release()
                self._parts.remove(part)
        if not self._parts:
            self._track(None)

    def _track(self, tracker: StepTracker | None) -> None:
        """Let a tracker tell all parts the step, in place of the one before."""
        if self._tracker is not None:
            self._tracker.stop()
        self._tracker = tracker
        for part in self._parts:
            part.state.tracker = tracker


class InnerHandle(PatchHandle):
    """The handle of `patched` inside of another patch: it keeps what happened in its block.

    Args:
        outer: the handle of the patch that has its settings again afterwards.
    """

    def __init__(self, outer: PatchHandle) -> None:
        super().__init__()
        self.listeners, self._parts, self._outer = outer.listeners, outer._parts, outer

    def unpatch(self) -> None:
        """Put everything back; again does nothing."""
        self._outer.unpatch()

    def _close(self) -> None:
        """Keep the report, and let go of the patch."""
        self._past, self._parts = [self.report()], []


def patch(
    obj: object,
    *,
    kernel: str = "auto",
    variant: str = "auto",
    config_dir: str | os.PathLike[str] | None = None,
    components: str | Iterable[str] | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    min_seq: int = MIN_SEQ,
    on_unsupported: str = "fallback",
    check_finite: bool = False,
    policy: str | os.PathLike[str] | Policy | None = None,
    linears: str | None = None,
    rotation: int = 0,
    smoothing: str | os.PathLike[str] | None = None,
    keep_originals: bool = True,
) -> PatchHandle:
    """Run attention, and if asked linears, of a pipeline or of a model, on our kernels.

    Calls that a kernel cannot take, and short ones, go to the host's own attention with the
    arguments that the model passed; each reason is logged once and counted per layer. A second call
    changes the settings in place. Copies and pickles of a patched model are not patched.

    Args:
        obj: a pipeline, a model, what `torch.compile` made of it, or a module that contains one. Of
            a pipeline the denoisers are patched: `transformer*`, `unet*` and the like.
        kernel: `"auto"` for the default of the device, or a kernel by name; `"sdpa"` leaves every
            result as it is, to the bit. On a CPU a named kernel is emulated, `"auto"` does nothing.
        variant: `"auto"`, or one variant of the kernel.
        config_dir: folder of tuned configs, of attention and linears, that is searched before the
            others.
        components: names of the pipeline's components to patch instead.
        include: glob or globs of layer paths, with or without the component in front, to patch.
        exclude: glob or globs of layer paths to leave alone.
        min_seq: calls with fewer queries or keys go to the host's attention, whatever `kernel` is.
        on_unsupported: `"fallback"`, or `"error"` to raise where a kernel cannot take a call.
        check_finite: look at each eager output for NaN and infinity, which waits for the device. A
            warning names layer, forward and kernel of the first one, and the host's attention takes
            that call and all further ones of the layer.
        policy: a preset (`"fast"`, `"balanced"`, `"safe"`), a file of rules, or a `Policy`: which
            kernel each layer runs on at each denoising step. It takes the place of `kernel`; what
            no rule takes stays with the host's attention. Steps are counted by the pipeline's
            scheduler.
        linears: `"auto"`, `"fp8_row"`, `"fp8_tensor"` or `"int8_row"`: linears in the blocks of the
            model multiply 8-bit values, with weights that are quantized here and now; on a CPU a
            named kernel is emulated, `"auto"` does nothing. Embedders, modulation, linears of norms
            and projections around the blocks stay; experts of mixtures are taken too. `None` leaves
            all that no rule of the policy names.
        rotation: rotate input channels of these linears in blocks of up to so many (16 to 256; a
            linear takes the largest block that divides its channels), which spreads outliers: with
            `"int8_row"` half of the error or less. 0 for none.
        smoothing: a file of `sage policy smoothing`: input channels of these linears are divided by
            its factors, which even out outliers that are always in the same channels.
        keep_originals: keep the original weights, of linears in CPU memory, so that `unpatch` puts
            them back to the bit and the model can be saved and copied. `False` frees them:
            `unpatch` raises.

    Returns:
        The handle: `.unpatch()`, `.report()`, and a context manager.

    Raises:
        PatchError: `obj` has no attention that can be patched, or none that the arguments choose.
        UnknownKernelError: no kernel or variant of that name.
        ConfigError: `config_dir` is not a folder, or `policy` no sound one, or one of another
            model; or `smoothing` has no factors of a linear.
        UsageError: another argument is out of range.

    Example:
        >>> import torch, sage_plugin
        >>> from diffusers.models.attention_processor import Attention
        >>> layer = torch.nn.ModuleDict({"attn": Attention(query_dim=8, heads=2, dim_head=4)})
        >>> sage_plugin.patch(layer, kernel="sage")
        <PatchHandle of model, 1 attention layers>
        >>> sage_plugin.unpatch(layer)
    """
    options = checked_options(
        kernel, variant, config_dir, include, exclude, min_seq, on_unsupported, check_finite,
        policy, linears, keep_originals, rotation, smoothing,
    )  # fmt: skip
    chosen = choose(obj, components)
    tracker = _tracker_for(obj, options.policy)
    if options.policy is not None:
        routed.ready()
    with lock:
        known = {p: p.state.options for module in chosen.values() if (p := part_of(module))}
        handle = next(iter(known)).handle if known else PatchHandle()
        try:
            parts = [handle._take(name, module, options) for name, module in chosen.items()]
            for part in parts:
                part.apply(options)
            if not any(p.layers or p.linears.layers or p.experts.layers for p in parts):
                raise PatchError(_nothing_chosen(parts, options))
            _check_policy_of(parts, options.policy)
        except BaseException:
            handle._release([part for part in handle._parts if part not in known])
            for part, former in known.items():
                part.apply(former)
            if tracker is not None:
                tracker.stop()
            raise
        for part in known:
            part.count_anew()
        handle._track(tracker)
    logger.info("patched %r with kernel %r", handle, options.kernel)
    return handle


def unpatch(obj: object) -> None:
    """Put back everything that `patch` changed in a pipeline or model; again does nothing.

    Raises:
        PatchError: `obj` is neither a pipeline nor a module.

    Example:
        >>> import torch, sage_plugin
        >>> sage_plugin.unpatch(torch.nn.Linear(2, 2))
    """
    for part in parts_of(obj):
        part.handle._release([part])


def refresh(obj: object) -> PatchHandle:
    """Patch again, now and with the settings that are in force, what changed since `patch`.

    That is attention whose processor or class was replaced, and attention that came in since. An
    eager forward notices what was replaced by itself; a compiled one does not, and neither looks
    for new layers. Weights of patched linears and experts are quantized anew.

    Args:
        obj: a pipeline or model that is patched.

    Returns:
        Its handle.

    Raises:
        PatchError: nothing of `obj` is patched, or something new in it is patched by itself.

    Example:
        >>> import torch, sage_plugin
        >>> from diffusers.models.attention_processor import Attention, AttnProcessor2_0
        >>> layer = torch.nn.ModuleDict({"attn": Attention(query_dim=8, heads=2, dim_head=4)})
        >>> handle = sage_plugin.patch(layer, kernel="sage")
        >>> layer["attn"].set_processor(AttnProcessor2_0())
        >>> handle.report().lost
        ('model.attn',)
        >>> sage_plugin.refresh(layer).report().lost
        ()
    """
    parts = parts_of(obj)
    if not parts:
        raise PatchError(
            f"{type(obj).__name__} is not patched, so that there is nothing to refresh; call "
            "sage_plugin.patch() on it"
        )
    with lock:
        for part in parts:
            part.linears.distrust()
            part.experts.distrust()
            part.cover(part.state.options)
    return parts[0].handle


@contextlib.contextmanager
def patched(
    obj: object,
    *,
    kernel: str = "auto",
    variant: str = "auto",
    config_dir: str | os.PathLike[str] | None = None,
    components: str | Iterable[str] | None = None,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    min_seq: int = MIN_SEQ,
    on_unsupported: str = "fallback",
    check_finite: bool = False,
    policy: str | os.PathLike[str] | Policy | None = None,
    linears: str | None = None,
    rotation: int = 0,
    smoothing: str | os.PathLike[str] | None = None,
) -> Iterator[PatchHandle]:
    """`patch` for the duration of a `with` block; arguments and errors are those of `patch`.

    Original weights are always kept.

    Afterwards, and after an exception, the object is as it was: what was patched before has its
    former settings again, the rest is unpatched.

    Example:
        >>> import torch, sage_plugin
        >>> from diffusers.models.attention_processor import Attention
        >>> layer = torch.nn.ModuleDict({"attn": Attention(query_dim=8, heads=2, dim_head=4)})
        >>> with sage_plugin.patched(layer, kernel="sage", min_seq=0) as handle:
        ...     out = layer["attn"](torch.ones(1, 4, 8)).shape
        >>> handle.report().total_calls()
        1
    """
    if components is not None and not isinstance(components, str):
        components = tuple(components) if isinstance(components, Iterable) else components
    chosen = choose(obj, components)
    before = {
        name: (part.state.options, part.counts())
        for name, m in chosen.items()
        if (part := part_of(m))
    }
    handle = patch(
        obj, kernel=kernel, variant=variant, config_dir=config_dir, components=components,
        include=include, exclude=exclude, min_seq=min_seq, on_unsupported=on_unsupported,
        check_finite=check_finite, policy=policy, linears=linears, rotation=rotation,
        smoothing=smoothing,
    )  # fmt: skip
    inner = InnerHandle(handle) if before else None
    try:
        yield inner or handle
    finally:
        if inner is not None:
            inner._close()
        for name, module in chosen.items():
            part = part_of(module)
            if part is not None and name in before:
                options, counts = before[name]
                part.apply(options)
                part.handle._track(_tracker_for(obj, options.policy))
                part.count_on(counts)
            elif part is not None:
                part.handle._release([part])


def handle_of(obj: object) -> PatchHandle | None:
    """The handle of a patched pipeline or model, `None` if it is not patched as a whole.

    Raises:
        PatchError: `obj` is neither a pipeline nor a module.

    Example:
        >>> import torch
        >>> handle_of(torch.nn.Linear(2, 2)) is None
        True
    """
    parts = (part_of(module) for module in modules_of(obj))
    return next((part.handle for part in parts if part is not None), None)


def _tracker_for(obj: object, policy: Policy | None) -> StepTracker | None:
    """What tells the denoising steps that a policy goes by.

    Raises:
        ConfigError: nothing does.
    """
    if policy is None or not policy.needs_steps:
        return None
    if not schedulers_of(obj):
        raise ConfigError(
            f"the policy has bands of denoising steps, and {type(obj).__name__} has no scheduler "
            "that tells them; patch the pipeline instead of its model"
        )
    return StepTracker(obj)


def _check_policy_of(parts: list[Component], policy: Policy | None) -> None:
    """A policy fits the model: its class, and at least one layer for each rule.

    Raises:
        ConfigError: it does not.
    """
    if policy is None:
        return
    experts = [name for part in parts for name in part.experts.names()]
    names = {
        ATTENTION: [layer.name for part in parts for layer in part.layers.values()],
        LINEAR: [name for part in parts for name in part.linears.names()] + experts,
        GROUPED_LINEAR: experts,
    }
    models = (type(part.module).__name__ for part in parts)
    fitting_rules(policy, models, names, others="sage_plugin.continuous_batching()")


def _nothing_chosen(parts: list[Component], options: PatchOptions) -> str:
    skipped = {name: why for part in parts for name, why in part.skipped.items()}
    name, why = next(iter(skipped.items()))
    return (
        f"include={options.include!r}, exclude={options.exclude!r} choose none of {len(skipped)} "
        f"attention layers that can be patched; {name!r}, for example: {why}"
    )
