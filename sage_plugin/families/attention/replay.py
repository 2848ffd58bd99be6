"""A call of attention on its device: judged as it was saved, timed as a patched model makes it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sage_plugin.accuracy.output import ExactRows
from sage_plugin.capture.record import AttentionCapture
from sage_plugin.capture.store.reader import CaptureFolder
from sage_plugin.families.attention import cost
from sage_plugin.families.attention.reference import reference
from sage_plugin.families.family import ReplayCall, SplitCall
from sage_plugin.kernels.attention.api import attention
from sage_plugin.kernels.attention.recipes import implementation
from sage_plugin.kernels.contract import AttentionParams, Decision, bhsd
from sage_plugin.measure.inputs import Tensors, in_layout, synthetic
from sage_plugin.measure.masks import synthetic_mask
from sage_plugin.schema import CallShape, DeviceFacts, LaunchConfig


@dataclass(frozen=True, slots=True)
class AttentionReplay(ReplayCall):
    """Tensors of a call, as `families.family.ReplayCall`.

    Attributes:
        tensors: Q, K and V, indexed bhsd.
        mask: (B or 1, Hq or 1, Sq or 1, Sk), or `None`.
        shape: their shape, with the layout, scale and causality of the call.
    """

    tensors: Tensors
    mask: torch.Tensor | None
    shape: CallShape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its output."""
        return self.tensors[2].dtype

    def inputs(self) -> dict[str, torch.Tensor]:
        """Name its tensors."""
        named = dict(zip("qkv", self.tensors, strict=True))
        return named if self.mask is None else named | {"mask": self.mask}

    def full_size(self, shape: CallShape) -> AttentionReplay:
        """Repeat the saved heads to the full call, for timing; error is judged on the saved ones.

        The saved ones come over and over; a key head brings its own group of query heads along.
        Mask entries of single batch items and heads go where those go. What is one entry for all
        that was saved stays one entry for all, so that nothing is read, or held, more often than by
        the model; a mask of which a single batch item or head was saved is timed as if it served
        all.

        Example:
            >>> from sage_plugin.measure.inputs import self_attention, synthetic
            >>> saved = self_attention(1, 2, 16, 8)
            >>> call = AttentionReplay(synthetic(saved, device="cpu"), None, saved)
            >>> call.full_size(self_attention(2, 6, 16, 8)).tensors[0].shape
            torch.Size([2, 6, 16, 8])
        """
        if shape == self.shape and shape.layout == "bhsd":
            return self
        q, k, v = self.tensors
        batch = torch.arange(shape.batch, device=k.device) % k.shape[0]
        heads_k = torch.arange(shape.heads_k, device=k.device) % k.shape[1]
        group = shape.heads_q // shape.heads_k
        heads_q = (heads_k[:, None] * group + torch.arange(group, device=k.device)).flatten()

        def repeated(saved: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
            return in_layout(saved[batch][:, heads], shape.layout)

        mask = self.mask
        if mask is not None and mask.shape[:2] != (1, 1):
            first = batch.new_zeros(1)
            items = batch if mask.shape[0] > 1 else first
            mask = mask[items[:, None], heads_q if mask.shape[1] > 1 else first]
        tensors = (repeated(q, heads_q), repeated(k, heads_k), repeated(v, heads_k))
        return AttentionReplay(tensors, mask, shape)

    def exact(self, rows: torch.Tensor | None = None) -> ExactRows:
        """Compute rows of exact attention, at most 256 sampled ones by default."""
        shape = self.shape
        options = {"causal": shape.causal, "scale": shape.scale, "mask": self.mask, "rows": rows}
        return reference(*self.tensors, **options)  # type: ignore[arg-type]

    def output(
        self, decision: Decision, config: LaunchConfig | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Run a kernel as `attention` does, on bhsd tensors."""
        call = dataclasses.replace(self, shape=dataclasses.replace(self.shape, layout="bhsd"))
        return call._attention(decision, config, *self.tensors, out_dtype=dtype)

    def judged_size(self) -> tuple[int, ...]:
        """Return the shape of the output, indexed bhsd."""
        q, _, v = self.tensors
        return (*q.shape[:3], v.shape[3])

    def whole(
        self, decision: Decision | None = None, config: LaunchConfig | None = None
    ) -> Callable[[], object]:
        """Return the call with quantization, or torch's attention without a decision."""
        decision = decision or Decision("sdpa", "auto")
        return functools.partial(self._attention, decision, config, *self._as_passed())

    def split(
        self, decision: Decision, config: LaunchConfig | None, facts: DeviceFacts
    ) -> SplitCall:
        """Quantize for a kernel, and return the call in its two parts."""
        fp8 = getattr(torch, facts.fp8_dtype or "float8_e4m3fn")
        built = implementation(decision.kernel, decision.variant, fp8)
        shape = self.shape
        problem = AttentionParams(shape.scale, shape.causal, shape.layout, self.mask, lse=False)
        prepare = functools.partial(
            built.prepare, *self._as_passed(), problem=problem, launch=config
        )
        on_gpu = self.tensors[0].is_cuda
        with torch.cuda.device(self.tensors[0].device) if on_gpu else contextlib.nullcontext():
            operands = prepare()
        return SplitCall(
            whole=lambda: built.launch(prepare()),
            alone=functools.partial(built.launch, operands),
            quantizes=cost.quantizes(operands),
            moved_bytes=cost.moved_bytes(operands, shape),
        )

    def flops(self) -> int:
        """Count its operations, with its mask."""
        return cost.flops(self.shape, self.mask)

    def _as_passed(self) -> Tensors:
        """Q, K and V as a model passes them."""
        q, k, v = (bhsd(tensor, self.shape.layout) for tensor in self.tensors)  # its own inverse
        return q, k, v

    def _attention(
        self,
        decision: Decision,
        config: LaunchConfig | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        shape = self.shape
        out: torch.Tensor = attention(  # type: ignore[assignment]
            q,
            k,
            v,
            attn_mask=self.mask,
            is_causal=shape.causal,
            scale=shape.scale,
            enable_gqa=shape.heads_q != shape.heads_k,
            kernel=decision.kernel,
            variant=decision.variant,
            layout=shape.layout,
            launch=config,
            out_dtype=out_dtype,
        )
        return out


def saved_shape(record: AttentionCapture) -> CallShape:
    """Return the shape of what a capture holds of its call."""
    shape = record.shape
    group = shape.heads_q // shape.heads_k
    batch, heads = len(record.batch_indices), len(record.head_indices)
    return dataclasses.replace(shape, batch=batch, heads_q=heads * group, heads_k=heads)


def captured(
    folder: CaptureFolder, record: AttentionCapture, device: torch.device | str
) -> AttentionReplay:
    """Load a capture.

    Raises:
        CaptureError: it is damaged.
    """
    call = folder.load(record, str(device))
    return AttentionReplay((call.q, call.k, call.v), call.mask, saved_shape(record))


def drawn(
    shape: CallShape, device: torch.device | str, seed: int = 0, distribution: str = "normal"
) -> AttentionReplay:
    """Draw values of a shape, and its mask."""
    tensors = synthetic(shape, device=device, seed=seed, distribution=distribution)
    return AttentionReplay(tensors, synthetic_mask(shape, device=device, seed=seed), shape)
