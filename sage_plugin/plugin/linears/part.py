"""The linears of one patched component."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from sage_plugin.errors import ConfigError, PatchError
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin.context import PatchOptions, PatchState
from sage_plugin.plugin.counts import LayerCounts
from sage_plugin.plugin.hosts.tensor_parallel import transforms_of
from sage_plugin.plugin.linears.eligible import FoundLinear, find_linears
from sage_plugin.plugin.linears.feed_forward import FusedFeedForwards
from sage_plugin.plugin.linears.layer import SLOT, LinearLayer
from sage_plugin.plugin.linears.module import QuantizedLinear
from sage_plugin.plugin.linears.norm import PendingNorms
from sage_plugin.plugin.linears.roles import plain_path
from sage_plugin.plugin.policy.rules import BASELINE, LINEAR
from sage_plugin.plugin.twin import plain_class

EXCLUDED = FallbackReason(Fallback.LINEAR_EXCLUDED)
NO_RULE = FallbackReason(Fallback.POLICY_WITHOUT_RULE)
NEW = FallbackReason(Fallback.LINEAR_NEW)


class LinearChoice(NamedTuple):
    """What a linear runs on.

    Attributes:
        kernel: by name, or `"auto"`.
        rule: number of the policy's rule that chose it, 0 where none did.
        rotation: most input channels of a block that is rotated, 0 for none.
        smoothed: whether its input channels are divided by factors.
    """

    kernel: str
    rule: int = 0
    rotation: int = 0
    smoothed: bool = False


class LinearPart:
    """The linears of a component, which shares its state with them.

    Attributes:
        layers: patched linears by path inside the component.
        left: linears that run as ever by path, and why.
        fused: feed-forward modules whose GELU is quantized in the pass that makes it.
        norms: norms that are modulated and quantized in one pass.
    """

    def __init__(self, state: PatchState) -> None:
        self.state = state
        self.layers: dict[str, LinearLayer] = {}
        self.left: dict[str, FallbackReason] = {}
        self.fused = FusedFeedForwards()
        self.norms = PendingNorms()

    def cover(self, model: nn.Module | None, attention: Iterable[str]) -> None:
        """Patch the linears that the state's options choose, and put back the others.

        Args:
            model: the component's module, `None` when it is gone.
            attention: paths of its attention modules.

        Raises:
            PatchError: one whose original was freed would have to be put back.
            ConfigError: one that is to be smoothed has no factors.
        """
        options, attention = self.state.options, list(attention)
        found = {}
        if options.has_linears and model is not None:
            found = find_linears(model, attention)
        former = {id(x.module): x for x in self.layers.values()}
        layers: dict[str, LinearLayer] = {}
        self.left = {}
        for path, one in found.items():
            wanted = self._wanted(path, one, options)
            if isinstance(wanted, FallbackReason):
                self.left[path] = wanted
                continue
            smooth = self._factors(path, one.module) if wanted.smoothed else None
            known = former.get(id(one.module))
            if known is not None and _same(known, wanted, smooth, keep=options.keep_originals):
                del former[id(one.module)]
                known.rule, layers[path] = wanted.rule, known
            else:
                layers[path] = LinearLayer(
                    "", one.role, self.state, wanted.kernel, wanted.rule, options.keep_originals,
                    wanted.rotation, smooth,
                )  # fmt: skip
        for layer in former.values():
            layer.check_original()
        for layer in former.values():
            put_back(layer)
        self.layers = layers
        self.rename(self.state.component)
        for path, layer in layers.items():
            module = found[path].module
            if layer.module is None:
                self._check_owner(path, module)
                transforms = transforms_of(module)
                module.__class__ = QuantizedLinear
                layer.take(module, transforms)
            layer.begin_again()
        self.fused.cover(model)
        self.norms.cover(model, layers.values(), attention)
        self.settle()

    def settle(self) -> None:
        """Quantize what is not, or not as it is now; runs before each eager forward."""
        for layer in self.layers.values():
            if (module := layer.module) is not None:
                layer.check(module)

    def distrust(self) -> None:
        """Quantize all weights anew at the next chance: they may have been written unseen."""
        for layer in self.layers.values():
            if (module := layer.module) is not None and not layer.freed:
                layer.bring_home(module)

    def names(self) -> list[str]:
        """Names of all linears that rules may name: those whose role and make allow it."""
        left = (Fallback.POLICY, Fallback.POLICY_WITHOUT_RULE)
        paths = [*self.layers, *(p for p, why in self.left.items() if why.cause in left)]
        return [f"{self.state.component}.{plain_path(path)}" for path in paths]

    def check_originals(self) -> None:
        """Raise where a linear cannot be put back.

        Raises:
            PatchError: an original was freed.
        """
        for layer in self.layers.values():
            layer.check_original()

    def release(self) -> None:
        """Put every linear back, for good."""
        self.fused.release()
        self.norms.release()
        for layer in self.layers.values():
            put_back(layer)

    def rename(self, component: str) -> None:
        """Give the component, and so its linears, another name."""
        for path, layer in self.layers.items():
            layer.name = f"{component}.{path}" if path else component

    def count_on(self, counts: dict[str, LayerCounts]) -> None:
        """Go on from counts that another `patch` had set aside, from 0 where there are none."""
        for path, layer in self.layers.items():
            layer.counts = counts.get(path) or LayerCounts()

    def left_out(
        self, model: nn.Module | None, attention: Iterable[str]
    ) -> dict[str, FallbackReason]:
        """Linears that run as ever, and why; also those that came in since."""
        if model is None or not self.state.options.has_linears:
            return {}
        mine = {id(layer.module) for layer in self.layers.values()}
        new = {
            path: NEW
            for path, one in find_linears(model, attention).items()
            if id(one.module) not in mine and path not in self.left
        }
        stayed = {p: x.left for p, x in self.layers.items() if x.left is not None}
        return self.left | stayed | new

    def lost(self, model: nn.Module | None) -> Iterator[str]:
        """Names of the linears that the model has no more."""
        here = set() if model is None else set(map(id, model.modules()))
        for layer in self.layers.values():
            if (module := layer.module) is not None and id(module) not in here:
                yield layer.name

    def _wanted(
        self, path: str, one: FoundLinear, options: PatchOptions
    ) -> LinearChoice | FallbackReason:
        """What a linear runs on, or why it runs as ever."""
        return self.kernel_at(path, options) if one.reason is None else one.reason

    def kernel_at(
        self, path: str, options: PatchOptions, ops: tuple[str, ...] = (LINEAR,)
    ) -> LinearChoice | FallbackReason:
        """Return what a linear at a path runs on, or why it runs as ever.

        Args:
            path: inside the component.
            options: those of the patch.
            ops: op families whose rules are of it.
        """
        if not self._chosen(path, options):
            return EXCLUDED
        name = f"{self.state.component}.{plain_path(path)}"
        rules = () if options.policy is None else options.policy.rules
        for number, rule in enumerate(rules, start=1):
            if rule.op in ops and rule.names(name):
                if rule.kernel == BASELINE:
                    return FallbackReason(Fallback.POLICY, number)
                return LinearChoice(rule.kernel, number, rule.rotation, rule.smoothing)
        if options.linears is None:
            return NO_RULE
        return LinearChoice(options.linears, 0, options.rotation, options.smooth_linears)

    def _factors(self, path: str, module: nn.Module) -> torch.Tensor:
        """The smoothing factors of a linear.

        Raises:
            ConfigError: the file has none, or those of a linear of another width.
        """
        smoothing, weight = self.state.options.smoothing, module._parameters["weight"]
        assert smoothing is not None, "it was checked with the options"
        assert weight is not None
        name = f"{self.state.component}.{plain_path(path)}"
        found = smoothing.of(name)
        if found is None:
            raise ConfigError(
                f"{smoothing.path} has no factors of {name}: record every linear (`sage capture "
                "--op linear --max-captures N`) and write the file again, or leave it out with "
                "exclude= or a rule"
            )
        if len(found) < weight.shape[1]:
            raise ConfigError(
                f"{smoothing.path} has {len(found)} factors of {name}, which has "
                f"{weight.shape[1]} input channels: the file is of another model"
            )
        return found

    def _check_owner(self, path: str, module: nn.Module) -> None:
        """Raise where another patch has a linear.

        Raises:
            PatchError: it has.
        """
        owner: LinearLayer | None = vars(module).get(SLOT)
        if owner is not None and owner.state is not self.state:
            raise PatchError(
                f"{self.state.component}.{path} is patched already, as {owner.name}; unpatch that "
                "module first"
            )

    def _chosen(self, path: str, options: PatchOptions) -> bool:
        """Whether globs choose a linear, by its path or that of a module that it is in."""
        parts = plain_path(path).split(".")
        places = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        places += [f"{self.state.component}.{place}" for place in places]

        def matches(globs: tuple[str, ...]) -> bool:
            return any(fnmatchcase(place, glob) for place in places for glob in globs)

        return (options.include is None or matches(options.include)) and not matches(
            options.exclude
        )


def _same(
    known: LinearLayer, wanted: LinearChoice, smooth: torch.Tensor | None, *, keep: bool
) -> bool:
    """Whether a linear has the weight that is wanted."""
    if (known.kernel, known.rotation, known.keep) != (wanted.kernel, wanted.rotation, keep):
        return False
    if known.smooth is None or smooth is None:
        return known.smooth is smooth
    return torch.equal(known.smooth, smooth)


def put_back(layer: LinearLayer) -> None:
    """Undo what was done to a linear.

    Raises:
        PatchError: its original was freed.
    """
    module = layer.module
    if module is not None:
        layer.release(module)
        module.__class__ = plain_class(type(module))
