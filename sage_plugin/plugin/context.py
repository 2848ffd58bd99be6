"""What a patched layer knows while its model runs.

Traced code reads a layer's `state` and plain fields of it, and all layers of a component share one
state: blocks that are compiled one by one then share one graph. Names, counters and listeners are
touched in eager mode alone.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from sage_plugin.kernels.attention.call import KernelRequest
from sage_plugin.kernels.contract import Decision
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.plugin.counts import LayerCounts
from sage_plugin.plugin.linears.smoothing import Smoothing
from sage_plugin.plugin.policy.rules import LINEARS, Policy
from sage_plugin.plugin.prologue.unfused import Unfused
from sage_plugin.plugin.steps.forward import ForwardCounter
from sage_plugin.plugin.steps.tracker import StepTracker
from sage_plugin.schema import ATTENTION

if TYPE_CHECKING:
    from sage_plugin.plugin.component import Component
    from sage_plugin.plugin.prologue.deferred import Tape

WRAPPER = "_orig_mod"
"""Where a compiled module keeps the module inside it."""


@dataclass(frozen=True, slots=True)
class CallEvent:
    """One attention call of a patched layer, as listeners get it before it runs.

    Attributes:
        component: name of the denoiser, e.g. `"transformer"`.
        layer: module path of the attention, with the component in front.
        call_index: which attention call of the layer's current forward, from 0.
        q: queries as the model passed them, `(B, Hq, Sq, D)` or `(B, Sq, Hq, D)` as `layout` says.
        k: keys, likewise.
        v: values, likewise.
        attn_mask: the mask as the model passed it, or `None`.
        is_causal: whether the call is causal.
        scale: factor of the scores, `None` for the default.
        layout: `"bhsd"` or `"bshd"`.
        decision: where the call is about to run.
        blocked: why no kernel could take it, whatever was asked for, as far as its arguments tell.
    """

    family: ClassVar[str] = ATTENTION

    component: str
    layer: str
    call_index: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    attn_mask: torch.Tensor | None
    is_causal: bool
    scale: float | None
    layout: str
    decision: Decision
    blocked: FallbackReason | None = None


Listener = Callable[[CallEvent], None]


@dataclass(frozen=True)  # no slots: traced code reads it
class PatchOptions:
    """What `patch` was asked for, checked: its arguments by their names, and what follows.

    Attributes:
        strict: an unsupported call is an error, not a fallback.
        include: globs of layer paths to patch, `None` for all.
        policy: rules that choose the kernel of each call, `None` where `kernel` does.
        linears: kernel of the linears that no rule of the policy names, `None` to leave them.
        rotation: most input channels of a block that linears no rule names rotate, 0 for none.
        smoothing: factors of linears' inputs, `None` where there is no file of them.
        smooth_linears: whether linears that no rule names are smoothed too.
        requests: what shall compute a call where no policy chooses, without and with grouped heads.
        of_linears: the same for a linear, whose weight says the kernel.
    """

    kernel: str
    variant: str
    config_dir: str | None
    min_seq: int
    strict: bool
    check_finite: bool
    include: tuple[str, ...] | None
    exclude: tuple[str, ...]
    policy: Policy | None = None
    linears: str | None = None
    keep_originals: bool = True
    rotation: int = 0
    smoothing: Smoothing | None = None
    smooth_linears: bool = False
    requests: tuple[KernelRequest, KernelRequest] = field(init=False, compare=False, repr=False)
    of_linears: BackendRequest = field(init=False, compare=False, repr=False)

    @property
    def has_linears(self) -> bool:
        """Whether linears are patched, by their own option or by the policy."""
        ruled = self.policy is not None and any(r.op in LINEARS for r in self.policy.rules)
        return self.linears is not None or ruled

    def __post_init__(self) -> None:
        # Traced code reads it, and cannot enter the lock of a cached property.
        ask = functools.partial(KernelRequest, self.kernel, self.variant, None, self.config_dir)
        requests = (ask(let_through=(self.min_seq, grouped)) for grouped in (False, True))
        object.__setattr__(self, "requests", tuple(requests))
        object.__setattr__(self, "of_linears", BackendRequest(config_dir=self.config_dir))


@dataclass(eq=False)  # no slots: traced code reads it
class PatchState:
    """What all layers of one component share; a later `patch` changes it in place.

    Attributes:
        component: name of the component.
        options: the options of the last `patch`.
        listeners: the handle's list, called in eager mode.
        disabled: `SAGE_PLUGIN_DISABLE` was set when it was last read.
        warned: reasons and notices that were logged since the last `patch`.
        unbuilt: why the kernel of some calls cannot be built, by the discrete part of their key.
        prologues: whether norm and rotary embedding of Q and K may be fused, by their form.
        forwards: counts the eager forwards of the component since the last `patch`.
        running: eager forwards of the component that have begun and not ended.
        tracker: tells the denoising step, where a policy goes by steps.
        owner: the component itself, which can be found so from a layer.
    """

    component: str
    options: PatchOptions
    listeners: list[Listener]
    disabled: bool = False
    warned: set[FallbackReason | str] = field(default_factory=set)
    unbuilt: dict[tuple[object, ...], FallbackReason] = field(default_factory=dict)
    prologues: dict[tuple[object, ...], Unfused | bool] = field(default_factory=dict)
    forwards: ForwardCounter = field(default_factory=ForwardCounter)
    running: int = 0
    tracker: StepTracker | None = None
    owner: Component | None = None


@dataclass(eq=False)  # no slots: traced code reads `state`
class LayerContext:
    """One patched attention layer: its place, its counters, and what to put back.

    It does not keep its module alive, and lets go of the processors when the module goes.

    Attributes:
        name: module path with the component in front.
        state: what it shares with the other layers of the component.
        module: the attention module.
        original: the processor that `unpatch` puts back; the class of a module that attends itself.
        processor: our twin of it, with one `__dict__` for both; our class of such a module; `None`
            where it cannot be patched.
        attends_itself: whether the module has no processor.
        counts: what it did since the last `patch`.
        broken: why `check_finite` took its kernel away, or `None`.
        norms: its norms of Q and K that put their work off.
        handle: names the layer in a graph, which reads it when it runs; layers share a graph so.
    """

    name: str
    state: PatchState
    module: InitVar[nn.Module]
    original: object
    processor: object = None
    attends_itself: bool = False
    counts: LayerCounts = field(default_factory=LayerCounts)
    broken: FallbackReason | None = None
    norms: tuple[weakref.ref[nn.Module], ...] = ()
    handle: torch.Tensor = field(init=False)

    def __post_init__(self, module: nn.Module) -> None:
        self.move(module)
        number = next(_numbers)
        self.handle = torch.tensor(number, device="cpu")
        LAYERS[number] = self

    @property
    def attention(self) -> nn.Module | None:
        """The attention module, `None` when it is gone."""
        return self._module()

    def move(self, module: nn.Module) -> None:
        """Belong to another attention module."""
        this = weakref.ref(self)

        def gone(_: object) -> None:
            if (layer := this()) is not None:
                layer.original = layer.processor = None

        self._module = weakref.ref(module, gone)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of a patched module has no layer."""
        return type(None), ()


_numbers = itertools.count()
LAYERS: weakref.WeakValueDictionary[int, LayerContext] = weakref.WeakValueDictionary()
"""Layers by the number that their handles hold."""


def layer_with(processor: object) -> LayerContext | None:
    """The layer that a processor of ours was made for; `None` for any other object."""
    layers = (ref() for ref in LAYERS.valuerefs())
    return next((x for x in layers if x is not None and x.processor is processor), None)


def layer_path(path: str) -> str:
    """A module's path without what `torch.compile` puts around modules.

    Example:
        >>> layer_path("blocks._orig_mod.0.attn")
        'blocks.0.attn'
    """
    return ".".join(part for part in path.split(".") if part != WRAPPER)


def layer_form(path: str) -> str:
    """A layer's path without its numbers, equal for the same layer of every block.

    Example:
        >>> layer_form("transformer_2.blocks.12.attn1"), layer_form("model.layers.3")
        ('transformer_2.blocks.*.attn1', 'model.layers.*')
    """
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


class Frame:
    """One running call of a processor or module.

    Attributes:
        layer: what it is patched as.
        weights: whether attention weights are asked for.
        index: how many attention calls it has made.
        tape: what it has put off of the norm and rotary embedding of Q and K.
        unfused: why it has not, where it could have.
    """

    def __init__(self, layer: LayerContext | None, weights: bool = False) -> None:
        self.layer = layer
        self.weights = weights
        self.index = 0
        self.tape: Tape | None = None
        self.unfused: Unfused | None = None


class CallStack(threading.local):
    """The processor calls that run in this thread, innermost last.

    The functions that a processor calls get no `self`, so its `__call__` leaves its layer here.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []


STACK = CallStack()
