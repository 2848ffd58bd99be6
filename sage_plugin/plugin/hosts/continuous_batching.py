"""Paged attention under transformers' continuous batching (`generate_batch`).

Its manager lets through attention of a few names alone: `sdpa`, `paged|eager`, and whatever has
"flash" in it, to which it gives packed sequences without a mask, and batches that only decode as a
table of pages. Our function stands in the table of attention functions under such a name, and the
configuration of the one model has it for as long as the handle is open. What of transformers is
changed for all models, and put back with the last handle, is in `batching_doors.py`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from sage_plugin import device
from sage_plugin.errors import PatchError, UnsupportedInputError, UsageError
from sage_plugin.kernels.attention.varlen import attention_varlen
from sage_plugin.kernels.paged_attention.api import attended
from sage_plugin.kernels.paged_attention.append import append_pages
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.kernels.paged_attention.dispatch import cache_reason, parse_kernel, reads
from sage_plugin.paged_records import PAGED_ATTENTION
from sage_plugin.plugin.hosts import batching_doors as doors
from sage_plugin.plugin.hosts.batching_doors import FIELD
from sage_plugin.plugin.hosts.eight_bit_pages import check_release
from sage_plugin.plugin.hosts.layer_keys import layer_keys
from sage_plugin.plugin.hosts.transformers import attention_modules
from sage_plugin.plugin.policy.fit import fitting_rules
from sage_plugin.plugin.policy.rules import Policy, chosen

__all__ = ["ContinuousBatching", "continuous_batching"]

CACHES = ("auto", "fp8", "int8")

_lock = threading.Lock()
_handles: dict[int, ContinuousBatching] = {}
"""Open handles by the identity of the configurations that have our name."""


class LayerKernel(NamedTuple):
    """What one layer runs on.

    Attributes:
        kernel: kernel of `paged_attention`.
        rule: number of the policy's rule that chose it, from 1; 0 where none did.
    """

    kernel: str
    rule: int = 0


Layers = Mapping[nn.Module, LayerKernel]
"""By attention module, those that a policy chooses for."""


class ContinuousBatching:
    """A model whose continuous batching runs on paged attention, until `close`.

    Attributes:
        kernel: kernel of `paged_attention` in layers that no rule takes.
        dtype: what the caches of managers that are made meanwhile hold, `None` for what the model
            computes in.
        decoded: calls of layers with one new token of each sequence; what a CUDA graph repeats is
            not counted.
        packed: calls of layers with prompts among them.
        rules: calls that read pages, by the number of the policy's rule that chose the kernel.
    """

    def __init__(
        self, configs: list[Any], kernel: str, dtype: torch.dtype | None, layers: Layers
    ) -> None:
        self.kernel, self.dtype, self._layers = kernel, dtype, layers
        self.decoded, self.packed = 0, 0
        self.rules: Counter[int] = Counter()
        self._before = [(config, getattr(config, FIELD)) for config in configs]
        with _lock:
            name = doors.enter(_attention, _dtype_of)
            for config in configs:
                setattr(config, FIELD, name)
                _handles[id(config)] = self

    def close(self) -> None:
        """Give the model its own attention back; nothing where that was done before."""
        with _lock:
            for config, name in self._before:
                setattr(config, FIELD, name)
                del _handles[id(config)]
            self._before.clear()
            if not _handles:
                doors.leave()

    def kernel_of(self, module: nn.Module) -> str:
        """Return what a layer runs on, and count its rule."""
        known = self._layers.get(module)
        if known is None:
            return self.kernel
        self.rules[known.rule] += 1
        return known.kernel

    def __enter__(self) -> ContinuousBatching:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "open" if self._before else "closed"
        calls = f"{self.decoded} decoded, {self.packed} packed"
        return f"<ContinuousBatching {self.kernel}, {state}: {calls}>"


def continuous_batching(
    model: nn.Module,
    *,
    kernel: str = "auto",
    cache: str = "auto",
    policy: str | os.PathLike[str] | Policy | None = None,
) -> ContinuousBatching:
    """Run the continuous batching of a transformers model on paged attention.

    Batches that only decode read keys and values where they lie in the cache's pages; prompts are
    packed sequences without a mask. What the model does otherwise, such as `generate`, is refused
    for as long as the handle is open.

    Args:
        model: a model of transformers with `generate_batch`.
        kernel: as for `paged_attention`.
        cache: `"auto"` for keys and values as the model computes them; `"fp8"` and `"int8"` for
            half their bytes, with a scale for each page and key head, in managers that are made
            while the handle is open. Every key is then read from its page, those of prompts too.
        policy: a file of rules, or a `Policy`: those of `paged_attention` choose the kernel of each
            layer. It takes the place of `kernel`; what no rule takes has queries in 16 bits.

    Returns:
        A handle, also a context manager; `close` gives the model its own attention back.

    Raises:
        PatchError: the model is none of transformers, or has an open handle already; or the
            installed transformers has no caches that can hold 8 bits.
        UnknownKernelError: no kernel of that name.
        UnsupportedInputError: a kernel that does not read the cache, or a device without its type.
        ConfigError: the policy is no sound one, of another model, or has no rule for this.
        UsageError: another argument is out of range.
    """
    parse_kernel(kernel)
    configs = list(_configs(model)) if isinstance(model, nn.Module) else []
    if not callable(getattr(model, "generate_batch", None)) or not configs:
        raise PatchError(
            f"{type(model).__name__} has no generate_batch of transformers; continuous batching "
            "needs a causal language model of it"
        )
    if any(id(config) in _handles for config in configs):
        raise PatchError(
            f"{type(model).__name__} runs continuous batching on paged attention already; close "
            "its handle first"
        )
    dtype = _dtype_of_cache(model, cache)
    if policy is not None and kernel != "auto":
        raise UsageError(
            f"kernel {kernel!r} and a policy were given; a policy names the kernels itself"
        )
    _check_reads(kernel, cache, dtype)
    layers = {} if policy is None else _chosen_layers(model, chosen(policy), cache, dtype)
    return ContinuousBatching(configs, kernel, dtype, layers)


def _dtype_of_cache(model: nn.Module, cache: str) -> torch.dtype | None:
    """What the caches shall hold, `None` for what the model computes in.

    Raises:
        UsageError: no cache of that name.
        UnsupportedInputError: the model's device has no such type.
        PatchError: the installed transformers has no such caches.
    """
    if cache not in CACHES:
        raise UsageError(f"cache is {cache!r}; choose one of {', '.join(CACHES)}")
    if cache == "auto":
        return None
    check_release()
    where = next(model.parameters()).device
    facts = device.facts_of(where.type, where.index)
    name = "int8" if cache == "int8" else facts.fp8_dtype or "float8_e4m3fn"
    dtype: torch.dtype = getattr(torch, name)
    reason = cache_reason(dtype, facts)
    if reason is not None:
        raise UnsupportedInputError(f"cache {cache!r} on {facts.name}: {reason}; use cache='int8'")
    return dtype


def _check_reads(kernel: str, cache: str, dtype: torch.dtype | None, where: str = "") -> None:
    """Refuse a kernel that quantizes queries as another cache is.

    Raises:
        UnsupportedInputError: it does.
    """
    if not reads(parse_kernel(kernel)[0], dtype):
        raise UnsupportedInputError(
            f"{where}kernel {kernel!r} quantizes queries as the cache is, and cache is {cache!r}; "
            "give it the cache of its name, or use kernel 'fav2'"
        )


def _chosen_layers(
    model: nn.Module, policy: Policy, cache: str, dtype: torch.dtype | None
) -> Layers:
    """What each layer runs on whose path a rule names, the first that does.

    Raises:
        ConfigError: the policy is of another model, has no rule of paged attention, or one that
            names no layer.
        UnsupportedInputError: a rule's kernel does not read the cache.
    """
    modules = {module: f"model.{path}" for path, module, _ in attention_modules(model)}
    of_module = {module: (name, f"{name}.{PAGED_ATTENTION}") for module, name in modules.items()}
    names = {PAGED_ATTENTION: [name for both in of_module.values() for name in both]}
    layers: weakref.WeakKeyDictionary[nn.Module, LayerKernel] = weakref.WeakKeyDictionary()
    for number, rule in fitting_rules(
        policy, [type(model).__name__], names, others="sage_plugin.patch()"
    ):
        _check_reads(rule.kernel, cache, dtype, f"rule {number} of the policy: ")
        for module, both in of_module.items():
            if any(map(rule.names, both)):
                layers.setdefault(module, LayerKernel(rule.kernel, number))
    return layers


def _dtype_of(config: object) -> torch.dtype | None:
    """What the caches of a model shall hold, by its configuration."""
    owner = _handles.get(id(config))
    return None if owner is None else owner.dtype


def _configs(model: nn.Module) -> Iterator[Any]:
    """Every configuration of a model that names its attention, each once."""
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, FIELD) and id(config) not in seen:
            seen.add(id(config))
            yield config


@torch.compiler.disable
def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **others: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, None]:
    """Attention of one layer: Q, K and V are `(1, heads, tokens, D)`, all sequences in a row."""
    owner = _handles.get(id(getattr(module, "config", None)))
    if owner is None or cu_seq_lens_q is None or attention_mask is not None:
        raise UnsupportedInputError(
            f"{type(module).__name__} is called outside of generate_batch while "
            "sage_plugin.continuous_batching is open; close its handle first"
        )
    q = query[0].transpose(0, 1)
    keys = layer_keys(module, key, value, others)
    if owner.dtype != (None if keys.k_scale is None else keys.k_cache.dtype):
        raise UnsupportedInputError(
            "this manager was made for another cache than sage_plugin.continuous_batching has now; "
            "make a new manager while the handle is open"
        )
    rest: dict[str, Any] = {
        "window": None if sliding_window is None else (sliding_window - 1, -1),
        "scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux, "is_causal": True,
    }  # fmt: skip
    if keys.longest[0] == 1 and keys.table is not None:
        owner.decoded += 1
    else:
        owner.packed += 1
    out: Any
    if keys.table is None:
        out = attention_varlen(
            q, keys.k, keys.v, cu_seq_lens_q.int(), keys.ends, *keys.longest, kernel="fav2", **rest
        )
    else:
        count = keys.table.shape[0]
        lens = keys.ends[1 : count + 1] - keys.ends[:count]
        pages = (keys.k_cache, keys.v_cache, keys.table, lens, cu_seq_lens_q[: count + 1])
        append_pages(keys.k, keys.v, *pages, k_scale=keys.k_scale, v_scale=keys.v_scale)
        call = PagedCall(q, *pages, k_scale=keys.k_scale, v_scale=keys.v_scale, **rest)
        out, _ = attended(call, owner.kernel_of(module), module)
    return out[None], None
