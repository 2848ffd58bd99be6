"""What a diffusers pipeline or model holds: denoisers, their attention modules, their processors.

Everything is recognised by what it is made of, so that nothing of diffusers is imported here. An
attention module is one with a `processor` of its own whose class calls attention, or one that calls
it itself; those of transformers are found in `transformers.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from sage_plugin.errors import PatchError
from sage_plugin.plugin import retarget
from sage_plugin.plugin.context import WRAPPER, LayerContext, layer_path, layer_with
from sage_plugin.plugin.hosts import transformers
from sage_plugin.plugin.options.texts import texts
from sage_plugin.plugin.prologue import norms
from sage_plugin.plugin.redirect import NO_CALL
from sage_plugin.plugin.twin import (
    LAYER,
    layer_of,
    lies_in_dict,
    make_plain,
    original_class,
    twin_of,
)

DENOISERS = ("transformer*", "unet*", "*_transformer", "*_unet", "prior", "prior_prior", "decoder")
"""Component names of a pipeline that `patch` chooses by itself."""

SLOTS = "the processor keeps its state in __slots__, which no other object can share"

AUTOENCODERS = ("Autoencoder", "AsymmetricAutoencoder", "ConsistencyDecoder", "VQModel")


def find_denoisers(obj: object) -> dict[str, nn.Module]:
    """The modules that `patch` works on by default, by name.

    Args:
        obj: a pipeline, a model, a compiled model, or any module.

    Returns:
        Denoisers that contain attention; empty where there is none. A single model is named
        `transformer`, `unet` or `model` after its class, as a pipeline would name it.

    Example:
        >>> find_denoisers(nn.Linear(2, 2))
        {}
    """
    if isinstance(obj, nn.Module):
        named = {_name_of(unwrapped(obj)): unwrapped(obj)}
    else:
        named = {
            name: module
            for name, module in components(obj).items()
            if any(fnmatchcase(name, pattern) for pattern in DENOISERS) and not _is_other(module)
        }
    return {name: module for name, module in named.items() if has_attention(module)}


def choose(obj: object, wanted: Iterable[str] | None) -> dict[str, nn.Module]:
    """The modules to patch: those named, or the denoisers.

    Raises:
        PatchError: `obj` holds no attention, or not the components that were named.
    """
    if wanted is None:
        found = find_denoisers(obj)
        if not found:
            raise PatchError(_nothing_to_patch(obj))
        return found
    names = texts(wanted)
    if names is None:
        raise PatchError(f"components is {wanted!r}; it is a component's name, or a list of them")
    if not names:
        raise PatchError("components is empty; name one or more, or leave it out for the denoisers")
    known = {_name_of(obj): unwrapped(obj)} if isinstance(obj, nn.Module) else components(obj)
    for name in names:
        if name not in known or not has_attention(known[name]):
            able = ", ".join(n for n, m in known.items() if has_attention(m)) or "none"
            raise PatchError(
                f"component {name!r} of {type(obj).__name__} has no attention to patch; "
                f"components that have: {able}"
            )
    return {name: known[name] for name in names}


def components(obj: object) -> dict[str, nn.Module]:
    """The modules of a pipeline by name, compiled ones unwrapped; empty for anything else."""
    if isinstance(obj, nn.Module | type):
        return {}
    parts = getattr(obj, "components", None)
    if not isinstance(parts, dict):
        return {}
    return {n: unwrapped(m) for n, m in parts.items() if isinstance(m, nn.Module)}


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside what `torch.compile(module)` returns."""
    while isinstance(inner := module._modules.get(WRAPPER), nn.Module):
        module = inner
    return module


def has_attention(module: nn.Module) -> bool:
    """Whether a module contains attention that can be patched.

    Example:
        >>> has_attention(nn.Linear(2, 2))
        False
    """
    return any(
        proc is owner or _class_for(proc) is not None
        for _, owner, proc in attention_modules(module)
    )


def attention_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module, object]]:
    """Path, module and processor of every attention module under `root`.

    A module without a processor, as all of transformers are, is its own. Autoencoders and
    transformers models inside a denoiser are passed over; what has no attention of diffusers, such
    as an adapter around a language model, is looked through for models of transformers.
    """
    found = list(_with_processors(root))
    yield from found
    if transformers.is_model(root) or not found:
        yield from transformers.attention_modules(root)


def _with_processors(root: nn.Module) -> Iterator[tuple[str, nn.Module, object]]:
    passed_over: list[str] = []
    for path, module in root.named_modules():
        if any(path.startswith(prefix) for prefix in passed_over):
            continue
        if module is not root and _is_other(module):
            passed_over.append(f"{path}.")
            continue
        # Not getattr: wrappers forward it, and the module inside comes by itself.
        processor = vars(module).get("processor", module._modules.get("processor"))
        if callable(processor):
            yield layer_path(path), module, processor
        elif _attends_itself(module):
            yield layer_path(path), module, module


def _attends_itself(module: nn.Module) -> bool:
    """Whether a module of diffusers calls attention in its `forward`, without a processor."""
    original = original_class(module)
    named = original.__module__.startswith("diffusers.")
    return named and retarget.patched_module_class(original) is not None


def swap(layer: LayerContext) -> str | None:
    """Give a layer's attention module a twin of its processor, of our class.

    A twin, since processors are shared between layers and sometimes between models; it has the very
    `__dict__` of the original, so that what is set on either, or stored by a call, is on both.

    Returns:
        Why the processor cannot be patched, `None` where it is.
    """
    original, module = layer.original, layer.attention
    generated = _class_for(original)
    if generated is None or module is None:
        return NO_CALL
    if not lies_in_dict(original):
        return SLOTS
    layer.processor = twin_of(original, generated)
    module.processor = layer.processor  # type: ignore[assignment]
    vars(module)[LAYER] = layer
    norms.attach(layer)
    return None


def put_back(layer: LayerContext) -> None:
    """Undo `swap`; a processor that somebody set since is left where it is."""
    twin, original, module = layer.processor, layer.original, layer.attention
    layer.processor = None
    norms.detach(layer)
    if module is None or twin is None:
        return
    if layer_of(module) is layer:
        del vars(module)[LAYER]
    if module.processor is twin:
        module.processor = original  # type: ignore[assignment]
    elif layer_with(module.processor) is None:  # upstream made it with `type(processor)()`
        make_plain(module.processor)
    # The twin may lie elsewhere: `fuse_qkv_projections` keeps the processors that it replaces.
    make_plain(twin)


def standing(layer: LayerContext) -> object:
    """The processor that stands in the layer's place."""
    return getattr(layer.attention, "processor", None)


found = standing
"""What there is to patch in a layer's place."""


def _class_for(processor: object) -> type | None:
    return retarget.patched_class(original_class(processor))


def _name_of(module: nn.Module) -> str:
    name = type(unwrapped(module)).__name__
    return "unet" if "UNet" in name else "transformer" if "Transformer" in name else "model"


def _is_other(module: nn.Module) -> bool:
    """An autoencoder or a model of transformers, which no denoiser is."""
    return type(module).__name__.startswith(AUTOENCODERS) or transformers.is_model(module)


def _nothing_to_patch(obj: object) -> str:
    kind = type(obj).__name__
    if transformers.is_model(obj):
        return (
            f"{kind} has no attention that looks its function up in transformers' table, so that "
            "there is nothing to put in place of"
        )
    if isinstance(obj, nn.Module):
        return f"{kind} contains no attention of diffusers or transformers; pass a model of theirs"
    if found := components(obj):
        return (
            f"{kind} has no denoiser with attention among its components "
            f"({', '.join(found)}); name one with components=..."
        )
    return f"got {kind}, expected a diffusers pipeline, its denoiser, or a module that contains one"
