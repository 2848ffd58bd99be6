"""The peers that may be installed beside ours, each behind one call on `(B, H, S, D)` tensors.

A peer that cannot be imported is left out with one sentence. Nothing here is needed by the package.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

E4M3_MAX = 448.0
TINY = 1e-12
SAGE1_HEAD_DIMS = (64, 96, 128)

Run = Callable[[], torch.Tensor]


class UnfitCallError(ValueError):
    """A call that a peer does not take."""


class Prepare(Protocol):
    """What a peer does before the call that is timed or judged."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Run:
        """A call without arguments that gives `(B, H, Sq, D)` and leaves q, k and v as they are."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One attention kernel that is not ours.

    Attributes:
        name: as tables show it.
        package: where it comes from.
        prepare: from tensors to the call.
        against: our kernels that are held to its accuracy; empty for a reference.
    """

    name: str
    package: str
    prepare: Prepare
    against: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """What is installed.

    Attributes:
        peers: those that can be imported.
        versions: of their packages.
        left_out: a sentence for each package that cannot be imported.
    """

    peers: tuple[Peer, ...]
    versions: dict[str, str]
    left_out: tuple[str, ...]


NOBODY = Found((), {}, ())


def timed_peers() -> Found:
    """Peers in the forms that are worth timing: with quantisation, and the kernel alone."""
    return _find(judged=False)


def judged_peers() -> Found:
    """Peers in the form that shows most of their result: fp32 output where they can give it."""
    return _find(judged=True)


def _find(*, judged: bool) -> Found:
    peers: list[Peer] = []
    versions, left_out = {}, []
    for package, load in LOADERS.items():
        try:
            loaded = load(judged)
        except Exception as error:  # a package built for another torch fails in many ways
            left_out.append(f"{package} cannot be imported and is left out ({first_line(error)})")
            continue
        peers += loaded
        versions[package] = package_version(package)
    return Found(tuple(peers), versions, tuple(left_out))


def first_line(error: BaseException) -> str:
    """The start of an error's message, in one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]


def package_version(package: str) -> str:
    """Version of an installed package, `"unknown"` where its metadata is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _nhd(tensor: torch.Tensor) -> torch.Tensor:
    """`(B, S, H, D)`, contiguous, from `(B, H, S, D)`."""
    return tensor.transpose(1, 2).contiguous()


def _hnd(out: Any) -> torch.Tensor:  # noqa: ANN401
    """`(B, H, S, D)` from what a FlashAttention function returns."""
    result: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return result.transpose(1, 2)


def _torch_backend(
    which: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> Run:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if causal and q.shape[2] != k.shape[2]:
        raise UnfitCallError("SDPA aligns its causal mask to the top left")
    grouped, backend = q.shape[1] != k.shape[1], getattr(SDPBackend, which)

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped
            )

    return call


def _torch(judged: bool) -> list[Peer]:
    del judged
    return [
        Peer("sdpa flash", "torch", functools.partial(_torch_backend, "FLASH_ATTENTION")),
        Peer("sdpa cudnn", "torch", functools.partial(_torch_backend, "CUDNN_ATTENTION")),
    ]


def e4m3_per_head(x: torch.Tensor, heads_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 values and fp32 descale factors `(B, Hk)`, as FlashAttention-3 takes them.

    Args:
        x: `(B, S, H, D)`; heads of one group share a factor, amax / 448.
        heads_k: key heads.

    Example:
        >>> values, descale = e4m3_per_head(torch.full((1, 2, 4, 8), 2.0), 2)
        >>> values.dtype, descale.shape, round(descale[0, 0].item() * 448, 3)
        (torch.float8_e4m3fn, torch.Size([1, 2]), 2.0)
    """
    batch, _, heads, _ = x.shape
    amax = x.abs().amax(dim=(1, 3)).float().view(batch, heads_k, -1).amax(-1).clamp_min(TINY)
    descale = amax / E4M3_MAX
    by_head = descale.repeat_interleave(heads // heads_k, dim=1)[:, None, :, None]
    values = (x.float() / by_head).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values, descale


def _fa3(judged: bool) -> list[Peer]:
    attend = importlib.import_module("fa3_fwd_interface").flash_attn_func

    def plain(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Run:
        if q.dtype != torch.bfloat16:
            raise UnfitCallError("this build takes bfloat16 alone")
        operands = [_nhd(x) for x in (q, k, v)]
        return lambda: _hnd(attend(*operands, softmax_scale=scale, causal=causal))

    def fp8(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Run:
        heads_k = k.shape[1]
        (q8, q_by), (k8, k_by), (v8, v_by) = (e4m3_per_head(_nhd(x), heads_k) for x in (q, k, v))
        return lambda: _hnd(
            attend(
                q8, k8, v8, softmax_scale=scale, causal=causal,
                q_descale=q_by, k_descale=k_by, v_descale=v_by,
            )
        )  # fmt: skip

    name = "fa3 fp8" if judged else "fa3 fp8 kernel alone"
    return [
        Peer("fa3 bf16", "fa3-fwd", plain),
        Peer(name, "fa3-fwd", fp8, against=("fav3_sage", "fav3_fp8")),
    ]


def _sageattention(judged: bool) -> list[Peer]:
    """SageAttention 1, or 2 where that is installed: both packages have one name."""
    core = importlib.import_module("sageattention.core")
    version = package_version("sageattention")
    name = f"sageattention {version}"

    def whole(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Run:
        own = k.clone()  # version 1 subtracts the mean of K in place
        return lambda: core.sageattn(
            q, own, v, tensor_layout="HND", is_causal=causal, sm_scale=scale
        )

    if not version.startswith("1."):
        return [Peer(name, "sageattention", whole, against=("fav3_sage",))]
    wide = functools.partial(_sage1_kernel, core, torch.float32)
    if judged:
        return [Peer(name, "sageattention", wide, against=("sage",))]
    kernel = functools.partial(_sage1_kernel, core, None)
    return [
        Peer(name, "sageattention", whole),
        Peer(f"{name} kernel alone", "sageattention", kernel),
    ]


def _sage1_kernel(
    core: Any,  # noqa: ANN401
    out_dtype: torch.dtype | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float,
) -> Run:
    """The steps of `sageattn` of version 1 one by one, which lets its kernel write fp32."""
    width = q.shape[3]
    if width not in SAGE1_HEAD_DIMS:
        raise UnfitCallError(f"head dim {width} is none of 64, 96, 128")
    if causal and q.shape[2] != k.shape[2]:
        raise UnfitCallError("its causal mask needs as many queries as keys")
    smooth = k - k.mean(dim=2, keepdim=True)
    quantize = core.per_block_int8_hd96 if width == 96 else core.per_block_int8
    q8, q_scale, k8, k_scale = quantize(q, smooth, sm_scale=scale, tensor_layout="HND")
    attend = getattr(core, f"attn_{'h96_' if width == 96 else ''}{'true' if causal else 'false'}")
    v16 = v.to(torch.float16)
    return lambda: attend(
        q8, k8, v16, q_scale, k_scale, tensor_layout="HND", output_dtype=out_dtype or q.dtype
    )


def _comfy(judged: bool) -> list[Peer]:
    kitchen = importlib.import_module("comfy_kitchen")

    def refuse(causal: bool) -> None:
        if causal:
            raise UnfitCallError("it has no causal mask of its own")

    def whole(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Run:
        refuse(causal)
        return lambda: kitchen.int8_attention(q, k, v, scale=scale)

    def kernel(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Run:
        refuse(causal)
        operands = kitchen.prequantize_int8_attention(q, k, v, scale=scale)
        return lambda: kitchen.int8_attention_from_prequantized(operands)

    found = [Peer("comfy-kitchen int8", "comfy-kitchen", whole)]
    return (
        found
        if judged
        else [*found, Peer(f"{found[0].name} kernel alone", "comfy-kitchen", kernel)]
    )


def _fa4(judged: bool) -> list[Peer]:
    del judged
    attend = importlib.import_module("flash_attn.cute").flash_attn_func

    def plain(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ) -> Run:
        operands = [_nhd(x) for x in (q, k, v)]
        return lambda: _hnd(attend(*operands, softmax_scale=scale, causal=causal))

    return [Peer("flash-attn-4", "flash-attn-4", plain)]


LOADERS: dict[str, Callable[[bool], list[Peer]]] = {
    "torch": _torch,
    "fa3-fwd": _fa3,
    "sageattention": _sageattention,
    "comfy-kitchen": _comfy,
    "flash-attn-4": _fa4,
}
