"""Paged attention under transformers' continuous batching (`generate_batch`).

Its manager lets through attention of a few names alone: `sdpa`, `paged|eager`, and whatever has
"flash" in it, to which it gives packed sequences without a mask, and batches that only decode as a
table of pages. Our function stands in the table of attention functions under such a name, and the
configuration of the one model has it for as long as the handle is open.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from sage_plugin.errors import PatchError, UnsupportedInputError
from sage_plugin.kernels.attention.varlen import attention_varlen
from sage_plugin.kernels.paged_attention.api import attended
from sage_plugin.kernels.paged_attention.append import append_pages
from sage_plugin.kernels.paged_attention.call import PagedCall
from sage_plugin.kernels.paged_attention.dispatch import parse_kernel
from sage_plugin.plugin.hosts.layer_keys import layer_keys

__all__ = ["ContinuousBatching", "continuous_batching"]

NAME = "sage_plugin_flash"
"""With "flash" in it, which the manager asks for; no package or kernel of that name is loaded."""

OLDER = f"paged|{NAME}"
"""As releases before 5.23 spell what they let through; later ones would take the prefix off."""

FIELD = "_attn_implementation_internal"
"""What a configuration keeps the name in: `set_attn_implementation` would look for a package."""

INITIALIZATION = "transformers.generation.continuous_batching.initialization"
GATE = "ensure_decode_fast_path_is_available"
"""Turns tables of pages off, but for FlashAttention 2 and 3 on CUDA."""

FULL = "full_attention"
"""The kind of layers whose caches have tables of pages."""

_lock = threading.Lock()
_handles: dict[int, ContinuousBatching] = {}
"""Open handles by the identity of the configurations that have our name."""


class ContinuousBatching:
    """A model whose continuous batching runs on paged attention, until `close`.

    Attributes:
        kernel: kernel of `paged_attention`.
        decoded: calls of layers that read pages in place; what a CUDA graph repeats is not counted.
        packed: calls of layers with prompts among them, whose keys came gathered.
    """

    def __init__(self, configs: list[Any], kernel: str) -> None:
        self.kernel, self.decoded, self.packed = kernel, 0, 0
        self._before = [(config, getattr(config, FIELD)) for config in configs]
        with _lock:
            name = _enter()
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
            _leave()

    def __enter__(self) -> ContinuousBatching:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "open" if self._before else "closed"
        calls = f"{self.decoded} decoded, {self.packed} packed"
        return f"<ContinuousBatching {self.kernel}, {state}: {calls}>"


def continuous_batching(model: nn.Module, *, kernel: str = "auto") -> ContinuousBatching:
    """Run the continuous batching of a transformers model on paged attention.

    Batches that only decode read keys and values where they lie in the cache's pages; prompts are
    packed sequences without a mask. What the model does otherwise, such as `generate`, is refused
    for as long as the handle is open.

    Args:
        model: a model of transformers with `generate_batch`.
        kernel: as for `paged_attention`.

    Returns:
        A handle, also a context manager; `close` gives the model its own attention back.

    Raises:
        PatchError: the model is none of transformers, or has an open handle already.
        UnknownKernelError: no kernel of that name.
    """
    parse_kernel(kernel)
    configs = list(_configs(model))
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
    return ContinuousBatching(configs, kernel)


def _configs(model: nn.Module) -> Iterator[Any]:
    """Every configuration of a model that names its attention, each once."""
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, FIELD) and id(config) not in seen:
            seen.add(id(config))
            yield config


def _enter() -> str:
    """Register the function, and open the gate to tables of pages for our name, which returns."""
    library: Any = importlib.import_module("transformers")
    cache: Any = importlib.import_module("transformers.generation.continuous_batching.cache")
    taken = inspect.signature(cache.PagedAttentionCache.update).parameters
    name = OLDER if "read_index" in taken else NAME
    masks = library.AttentionMaskInterface
    library.AttentionInterface.register(name, _attention)
    masks.register(name, masks()["flash_attention_2"])
    module = _initialization()
    gate = getattr(module, GATE, None)
    if gate is not None and not hasattr(gate, "__wrapped__"):
        setattr(module, GATE, _opened(gate))
    return name


def _leave() -> None:
    """Put the gate back once no handle is open."""
    module = _initialization()
    gate = getattr(module, GATE, None)
    if gate is not None and not _handles and hasattr(gate, "__wrapped__"):
        setattr(module, GATE, gate.__wrapped__)


def _initialization() -> Any:  # noqa: ANN401
    """The module with the gate; `None` in releases without one, which pack all batches alike."""
    try:
        return importlib.import_module(INITIALIZATION)
    except ImportError:
        return None


def _opened(gate: Callable[..., None]) -> Callable[..., None]:
    """The gate, which lets our name through where all of a model's layers have tables of pages."""

    @functools.wraps(gate)
    def opened(config: Any, cb_config: Any, *rest: object) -> None:  # noqa: ANN401
        if getattr(config, FIELD, None) not in (NAME, OLDER):
            gate(config, cb_config, *rest)
            return
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            kinds = [FULL if getattr(config, "sliding_window", None) is None else "sliding"]
        if any(kind != FULL for kind in kinds):
            cb_config.max_blocks_per_request = 0

    return opened


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
    rest: dict[str, Any] = {
        "window": None if sliding_window is None else (sliding_window - 1, -1),
        "scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux, "is_causal": True,
    }  # fmt: skip
    out: Any
    if keys.table is None:
        owner.packed += 1
        out = attention_varlen(
            q, keys.k, keys.v, cu_seq_lens_q.int(), keys.ends, *keys.longest, kernel="fav2", **rest
        )
    else:
        owner.decoded += 1
        count = keys.table.shape[0]
        lens = keys.ends[1 : count + 1] - keys.ends[:count]
        pages = (keys.k_cache, keys.v_cache, keys.table, lens, cu_seq_lens_q[: count + 1])
        append_pages(keys.k, keys.v, *pages)
        out, _ = attended(PagedCall(q, *pages, **rest), owner.kernel, module)
    return out[None], None
