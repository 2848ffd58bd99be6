"""`register`: our attention and experts by name, in the registries of diffusers and transformers.

For those who choose by a name: `model.set_attention_backend("sage_plugin")` of diffusers,
`attn_implementation="sage_plugin"` and `experts_implementation="sage_plugin"` of transformers. A
call by the name is decided as one of a patched layer is, and what no kernel takes goes to what is
the default of the library: `native` there, `sdpa` here, whose masks are made, and `grouped_mm` for
experts. The settings are those of the whole process, as the names are.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from torch import nn

from sage_plugin import settings
from sage_plugin.errors import PatchError, UnsupportedInputError
from sage_plugin.kernels.attention.call import AttentionCall
from sage_plugin.plugin import route
from sage_plugin.plugin.context import STACK, Frame, LayerContext, PatchOptions, PatchState
from sage_plugin.plugin.experts.named import NamedExperts
from sage_plugin.plugin.hosts import transformers_dispatch as interface
from sage_plugin.plugin.hosts.transformers_dispatch import NAME, UNKNOWN_TO_SDPA
from sage_plugin.plugin.linears import report as of_linears
from sage_plugin.plugin.options.checked import MIN_SEQ, checked_options
from sage_plugin.plugin.report import PluginReport, row_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

MEMBER = "SAGE_PLUGIN"
"""The name of our member in diffusers' enumeration of backends."""

LEFT_OUT = {
    **UNKNOWN_TO_SDPA,
    "sinks": "sinks",
    "indices": "choice of keys",
    "block_indices": "choice of keys",
}
"""Arguments by which a model says to any function but `eager` and `sdpa` what it keeps from them,
or puts into their masks; under our name it cannot know that it is `sdpa` that may answer."""


class NamedAttention:
    """Our attention under its name: its settings, and what the calls by the name did.

    Attributes:
        state: what the calls of all libraries share, the options among it.
        layers: one for each library in which the name is registered; it stands for all its calls.
        experts: the experts of mixtures that run by the name.
    """

    def __init__(self, options: PatchOptions) -> None:
        self.state = PatchState(NAME, options, [])
        self.layers: dict[str, LayerContext] = {}
        self.experts = NamedExperts(self.state)

    def report(self) -> PluginReport:
        """What the calls did since the name was registered first: one row a library and mixture."""
        rows = tuple(row_of(layer) for layer in self.layers.values())
        linears = tuple(of_linears.row_of(layer) for layer in self.experts.layers)
        return PluginReport(rows, {}, (), linears=linears)

    def __repr__(self) -> str:
        return f"<NamedAttention {NAME!r} in {', '.join(self.layers) or 'no library'}>"

    def _apply(self, options: PatchOptions) -> None:
        self.state.options = options
        self.experts.kernel = options.linears or "auto"
        self.state.disabled = settings.current().disabled
        self.state.warned.clear()
        self.state.unbuilt.clear()

    def _layer(self, library: str) -> LayerContext:
        """What stands for all calls from a library; no module is behind it."""
        if library not in self.layers:
            layer = LayerContext(f"{NAME}.{library}", self.state, nn.Identity(), None)
            self.layers[library] = layer
        return self.layers[library]

    def _attend(self, library: str, call: Callable[[], T], host: Callable[[], T]) -> T:
        """A call by the name: routed by its own settings, or the host's inside of a patched layer.

        Args:
            library: where it comes from.
            call: routes it.
            host: the host's own attention, for what a patched layer has decided already.
        """
        frames = STACK.frames
        if frames and frames[-1].layer is not None:
            return host()
        if not torch.compiler.is_compiling():
            self.state.disabled = settings.current().disabled
        frames.append(Frame(self.layers[library]))
        try:
            return call()
        finally:
            frames.pop()


_NAMED = NamedAttention(checked_options(linears="auto"))


def register(
    *,
    kernel: str = "auto",
    variant: str = "auto",
    config_dir: str | os.PathLike[str] | None = None,
    min_seq: int = MIN_SEQ,
    on_unsupported: str = "fallback",
    experts: str = "auto",
) -> NamedAttention:
    """Make our attention and experts known as `"sage_plugin"` to diffusers and transformers.

    Afterwards `model.set_attention_backend("sage_plugin")` and diffusers' `attention_backend`
    choose it, and so do `set_attn_implementation`, `from_pretrained` and `from_config` of
    transformers. Experts of its mixtures are chosen apart, by `set_experts_implementation` or
    `experts_implementation="sage_plugin"`; their weights are quantized at the first forward, beside
    the originals. A second call changes the settings in place, for all models that use the name. A
    library that is not installed is passed over. A patched layer goes by its patch, whatever name
    its model has.

    Call it before the first model of diffusers is imported where `DIFFUSERS_ATTN_BACKEND` is
    `sage_plugin`; it then also makes the backend the active one.

    Args:
        kernel: as for `patch`.
        variant: as for `patch`.
        config_dir: as for `patch`.
        min_seq: calls with fewer queries or keys go to the host's attention.
        on_unsupported: `"fallback"`, or `"error"` to raise where a kernel cannot take a call.
        experts: `"auto"`, `"fp8_row"` or `"int8_row"`: the kernel of experts.

    Returns:
        The one handle there is: `.report()` tells what calls by the name did.

    Raises:
        PatchError: neither library is installed.
        UnknownKernelError: no kernel or variant of that name.
        ConfigError: `config_dir` is not a folder.
        UsageError: another argument is out of range.

    Example:
        >>> import torch
        >>> from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
        >>> from sage_plugin.plugin.hosts.registration import register
        >>> named = register(kernel="sage", min_seq=16)
        >>> q, k, v = (torch.randn(1, 16, 2, 32) for _ in range(3))
        >>> with torch.no_grad(), attention_backend("sage_plugin"):
        ...     dispatch_attention_fn(q, k, v).shape
        torch.Size([1, 16, 2, 32])
        >>> named is register()
        True
    """
    options = checked_options(
        kernel, variant, config_dir, None, None, min_seq, on_unsupported, linears=experts
    )
    present = [library for library in _ENTRANCES if find_spec(library) is not None]
    if not present:
        raise PatchError(
            f"neither {' nor '.join(_ENTRANCES)} is installed, so that there is nothing to "
            f"register {NAME!r} with; install one of them, or call sage_plugin.attention()"
        )
    _NAMED._apply(options)
    for library in present:
        _NAMED._layer(library)
        _ENTRANCES[library](_NAMED)
    logger.info("registered %r with kernel %r", _NAMED, options.kernel)
    return _NAMED


def _enter_transformers(named: NamedAttention) -> None:
    """Register the function, and `sdpa`'s mask function, without which no mask is made."""
    library: Any = importlib.import_module("transformers")
    sdpa = library.AttentionInterface()["sdpa"]
    library.AttentionInterface.register(NAME, _transformers_function(named, sdpa))
    library.AttentionMaskInterface.register(NAME, library.AttentionMaskInterface()["sdpa"])
    named.experts.enter()


def _transformers_function(named: NamedAttention, sdpa: interface.Function) -> interface.Function:
    def sage_plugin(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *rest: object,
        **others: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        for name, meaning in LEFT_OUT.items():
            if others.get(name) is not None:
                raise UnsupportedInputError(
                    f"{type(module).__name__} passes {name}, a {meaning}, which attention by the "
                    f"name {NAME!r} would leave out; load the model with its own "
                    "attn_implementation and call sage_plugin.patch() on it"
                )

        def host() -> tuple[torch.Tensor, torch.Tensor | None]:
            return sdpa(module, query, key, value, attention_mask, *rest, **others)

        def call() -> tuple[torch.Tensor, torch.Tensor | None]:
            return interface.attention(
                sdpa, "sdpa", module, query, key, value, attention_mask, *rest, **others
            )

        return named._attend("transformers", call, host)

    return sage_plugin


def _enter_diffusers(named: NamedAttention) -> None:
    """Register the backend under a member that diffusers' enumeration does not foresee."""
    constants: Any = importlib.import_module("diffusers.utils.constants")
    dispatcher = _dispatcher(constants)
    backends, registry = dispatcher.AttentionBackendName, dispatcher._AttentionBackendRegistry
    known = MEMBER in backends.__members__
    member = backends[MEMBER] if known else _new_member(backends)
    registry.register(
        member, constraints=registry._constraints[backends.NATIVE], supports_context_parallel=True
    )(_diffusers_function(named, registry._backends[backends.NATIVE]))
    if constants.DIFFUSERS_ATTN_BACKEND == NAME and not known:
        registry.set_active_backend(member)


def _dispatcher(constants: Any) -> Any:  # noqa: ANN401
    """The module with diffusers' backends, which does not load while the environment names ours."""
    asked = constants.DIFFUSERS_ATTN_BACKEND
    if asked == NAME:
        constants.DIFFUSERS_ATTN_BACKEND = "native"
    try:
        return importlib.import_module("diffusers.models.attention_dispatch")
    finally:
        constants.DIFFUSERS_ATTN_BACKEND = asked


def _new_member(backends: Any) -> Any:  # noqa: ANN401
    member = str.__new__(backends, NAME)
    member._name_, member._value_ = MEMBER, NAME
    backends._member_map_[MEMBER] = member
    backends._value2member_map_[NAME] = member
    backends._member_names_.append(MEMBER)
    type.__setattr__(backends, MEMBER, member)
    return member


def _diffusers_function(
    named: NamedAttention, native: Callable[..., torch.Tensor]
) -> Callable[..., route.Result]:
    # diffusers drops without a word what the signature does not show.
    def sage_plugin(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: object = None,
    ) -> route.Result:
        def host() -> route.Result:
            return native(
                query=query, key=key, value=value, attn_mask=attn_mask, dropout_p=dropout_p,
                is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, return_lse=return_lse,
                _parallel_config=_parallel_config,
            )  # fmt: skip

        def call() -> route.Result:
            one = AttentionCall(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, "bshd",
                return_lse=return_lse,
            )  # fmt: skip
            return route.attend(host, one, None if _parallel_config is None else route.PARALLEL)

        return named._attend("diffusers", call, host)

    return sage_plugin


_ENTRANCES: dict[str, Callable[[NamedAttention], None]] = {
    "diffusers": _enter_diffusers,
    "transformers": _enter_transformers,
}
