"""`prepare()` and `launch()`: attention in two steps, with Q, K and V free to go in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention import dispatch, validate
from sage_plugin.kernels.attention.api import with_prologue
from sage_plugin.kernels.attention.call import AttentionCall, KernelRequest
from sage_plugin.kernels.attention.executor import HOST_REQUEST, Executor, resolve
from sage_plugin.kernels.attention.prologue.record import QkNorm, Rope
from sage_plugin.kernels.attention.recipes import built
from sage_plugin.kernels.contract import HOST, Decision, Operands, OutputForm
from sage_plugin.kernels.fallback import FallbackReason
from sage_plugin.kernels.surroundings import on_device, without_autocast
from sage_plugin.schema import LaunchConfig

__all__ = ["Prepared", "launch", "prepare"]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Prepared:
    """A call whose inputs are prepared; `launch` computes it, as often as you like.

    Attributes:
        decision: kernel and variant that it runs on.
        operands: what the kernel made of Q, K and V; its own affair.
        form: shape, strides, layout and device of the output.
        needs_grad: whether the host's attention has to let a gradient through.
        with_lse: whether the LSE may be asked for.
    """

    decision: Decision
    operands: Operands
    form: OutputForm
    needs_grad: bool
    with_lse: bool

    @property
    def held_bytes(self) -> int:
        """Bytes of device memory that the operands keep alive, each storage once."""
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in _tensors(self.operands)
        }
        return sum(storages.values())

    def __repr__(self) -> str:
        form = self.form
        return (
            f"<Prepared {self.decision.label} for q {form.shape} {form.layout} on {form.device}, "
            f"{self.held_bytes / 2**20:.1f} MiB held>"
        )


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    kernel: str = "auto",
    variant: str = "auto",
    layout: str = "bhsd",
    launch: LaunchConfig | None = None,
    config_dir: str | None = None,
    window: tuple[int, int] | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    rope: Rope | tuple[torch.Tensor, torch.Tensor] | torch.Tensor | None = None,
    q_norm: QkNorm | None = None,
    k_norm: QkNorm | None = None,
    with_lse: bool = True,
) -> Prepared:
    """The first step of `attention`: quantise, so that Q, K and V may be freed before `launch`.

    The quantised kernels `sage`, `fav3_sage` and `fav3_fp8` keep copies of 8 or 16 bits and no
    reference to Q, K and V (mask and sinks are kept). `fav2`, `sdpa` and `torch` read their inputs
    in place and keep them. Eager mode only; a compiler takes `attention` whole.

    Args:
        q: as in `attention`; the others likewise.
        k: keys.
        v: values.
        attn_mask: bool or float mask.
        is_causal: bottom-right aligned causal mask.
        scale: factor of the scores.
        kernel: kernel name; `"auto"` prepares what no kernel takes for the host's attention.
        variant: variant name.
        layout: layout of inputs and output.
        launch: launch config in place of the looked-up one.
        config_dir: folder of configs searched before all others.
        window: keys to the left and to the right that a query sees.
        softcap: bound of the scores.
        sinks: one more logit a query head.
        rope: rotary position embedding of Q and K.
        q_norm: norm of Q before it.
        k_norm: norm of K before it.
        with_lse: whether `launch` may be asked for the LSE; without it a quantised kernel has less
            to prepare, as in a call of `attention` that does not ask for it.

    Returns:
        What `launch` takes.

    Raises:
        UnsupportedInputError: arguments that do not fit together, or a named kernel that cannot
            take them.
        UnknownKernelError: no kernel or variant of that name.
        ConfigError: a launch config that the device cannot run.

    Example:
        >>> import torch, sage_plugin
        >>> q, k, v = (torch.randn(1, 2, 64, 32) for _ in range(3))
        >>> prepared = sage_plugin.prepare(q, k, v, kernel="sage")
        >>> del q, k, v
        >>> sage_plugin.launch(prepared).shape
        torch.Size([1, 2, 64, 32])
    """
    call = with_prologue(
        AttentionCall(
            q, k, v, attn_mask, 0.0, is_causal, scale, True, layout, softcap, sinks, with_lse,
            window,
        ),
        rope, q_norm, k_norm,
    )  # fmt: skip
    executor = resolve(call, KernelRequest(kernel, variant, launch, config_dir))
    if isinstance(executor, FallbackReason):
        if kernel != "auto":
            raise validate.refusal(kernel, executor)
        executor = resolve(call, HOST_REQUEST)
        assert isinstance(executor, Executor), "the host's attention takes every call"
    with on_device(q.device), without_autocast(q.device):
        operands = executor.prepared(call)
    form = OutputForm.of(call.q, layout)
    return Prepared(executor.decision, operands, form, call.needs_grad, with_lse)


def launch(
    prepared: Prepared, *, out_dtype: torch.dtype | None = None, return_lse: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The second step of `attention`.

    Args:
        prepared: what `prepare` returned.
        out_dtype: dtype of the output, V's if `None`.
        return_lse: also return the natural-log LSE, fp32 `(B, Hq, Sq)`, contiguous.

    Returns:
        What `attention` would have returned; to the bit where `prepare` had the `with_lse` that the
        call would have as `return_lse`, else but for the order of the sums in K's mean.

    Raises:
        UnsupportedInputError: `out_dtype` is no floating type, or an LSE of a call that needs a
            gradient or was prepared without it.

    Example:
        >>> import torch, sage_plugin
        >>> x = torch.randn(1, 2, 64, 32)
        >>> out, lse = sage_plugin.launch(sage_plugin.prepare(x, x, x), return_lse=True)
        >>> lse.shape
        torch.Size([1, 2, 64])
    """
    validate.check_out_dtype(out_dtype)
    if return_lse and prepared.needs_grad and torch.is_grad_enabled():
        raise UnsupportedInputError(
            "return_lse cannot be had together with a gradient; drop one of them"
        )
    if return_lse and not prepared.with_lse:
        raise UnsupportedInputError(
            "return_lse of a call that was prepared with with_lse=False; prepare it with "
            "with_lse=True"
        )
    form, decision = prepared.form, prepared.decision
    kernel = built(decision, dispatch.facts_of(form.device.type, form.device.index))
    with (
        on_device(form.device),
        without_autocast(form.device),
        torch.set_grad_enabled(prepared.needs_grad and torch.is_grad_enabled()),
    ):
        out, lse = kernel.launch(prepared.operands, out_dtype=out_dtype, return_lse=return_lse)
    if decision.variant == HOST and not prepared.needs_grad and out.shape == form.shape:
        out = out if out.stride() == form.strides else form.empty(out.dtype).copy_(out)
    return out if lse is None else (out, lse)


def _tensors(record: object) -> Iterator[torch.Tensor]:
    """The tensors in a record, and in the records and tuples inside it."""
    if isinstance(record, torch.Tensor):
        yield record
    elif dataclasses.is_dataclass(record) and not isinstance(record, type):
        for field in dataclasses.fields(record):
            yield from _tensors(getattr(record, field.name))
    elif isinstance(record, tuple | list):
        for item in record:
            yield from _tensors(item)
