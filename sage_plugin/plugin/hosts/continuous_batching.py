"""Paged attention under transformers' continuous batching (`generate_batch`).

Its manager lets through attention of a few names alone: `sdpa`, `paged|eager`, and whatever has
"flash" in it, to which it gives packed sequences without a mask, and batches that only decode as a
table of pages. Our function stands in the table of attention functions under such a name, and the
configuration of the one model has it for as long as the handle is open.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from sage_plugin.errors import PatchError, UnsupportedInputError
from sage_plugin.kernels.attention.varlen import attention_varlen
from sage_plugin.kernels.paged_attention.api import paged_attention
from sage_plugin.kernels.paged_attention.append import append_pages
from sage_plugin.kernels.paged_attention.dispatch import parse_kernel

__all__ = ["ContinuousBatching", "continuous_batching"]

NAME = "sage_plugin_flash"
"""With "flash" in it, which the manager asks for; no package or kernel of that name is loaded."""

FIELD = "_attn_implementation_internal"
"""What a configuration keeps the name in: `set_attn_implementation` would look for a package."""

INITIALIZATION = "transformers.generation.continuous_batching.initialization"
GATE = "ensure_decode_fast_path_is_available"
"""Turns tables of pages off, but for FlashAttention 2 and 3 on CUDA."""

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
            _enter()
            for config in configs:
                setattr(config, FIELD, NAME)
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


def _enter() -> None:
    """Register the function, and open the gate to tables of pages for our name."""
    library: Any = importlib.import_module("transformers")
    masks = library.AttentionMaskInterface
    library.AttentionInterface.register(NAME, _attention)
    masks.register(NAME, masks()["flash_attention_2"])
    module = _initialization()
    gate = getattr(module, GATE, None)
    if gate is not None and not hasattr(gate, "__wrapped__"):
        setattr(module, GATE, _opened(gate))


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
        if getattr(config, FIELD, None) != NAME:
            gate(config, cb_config, *rest)
            return
        module = _initialization()
        kinds = module.group_layers_by_attn_type(config)
        if not all(module.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in kinds):
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
    cu_seq_lens_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    **others: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, None]:
    """Attention of one layer: Q, K and V are `(1, heads, tokens, D)`, all sequences in a row."""
    owner = _handles.get(id(getattr(module, "config", None)))
    packed = cu_seq_lens_q is not None and cu_seq_lens_k is not None and attention_mask is None
    if owner is None or not packed:
        raise UnsupportedInputError(
            f"{type(module).__name__} is called outside of generate_batch while "
            "sage_plugin.continuous_batching is open; close its handle first"
        )
    assert cu_seq_lens_q is not None
    assert cu_seq_lens_k is not None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window = None if sliding_window is None else (sliding_window - 1, -1)
    rest: dict[str, Any] = {
        "is_causal": True,
        "scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    out: Any
    if block_table is None:
        owner.packed += 1
        out = attention_varlen(
            q, k, v, cu_seq_lens_q, cu_seq_lens_k, others["max_length_q"], others["max_length_k"],
            kernel="fav2", window=window, **rest,
        )  # fmt: skip
    else:
        owner.decoded += 1
        ends = cu_seq_lens_q[: block_table.shape[0] + 1]
        lens = cu_seq_lens_k[1 : block_table.shape[0] + 1] - cu_seq_lens_k[: block_table.shape[0]]
        pages = (others["k_cache"], others["v_cache"], block_table, lens, ends)
        append_pages(k, v, *pages)
        out = paged_attention(q, *pages, window=window, kernel=owner.kernel, **rest)
    return out[None], None
