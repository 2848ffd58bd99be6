"""Weights of linears in 8 bits, quantized once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from sage_plugin import device
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.linear.rows.quantized import quantized_rows
from sage_plugin.kernels.linear.rows.row_format import RowFormat, row_format
from sage_plugin.kernels.quantize.hadamard import rotated
from sage_plugin.kernels.support import TORCH_FP8_FASTEST, torch_alignment

CHUNK_VALUES = 1 << 24
"""Values of a weight that are quantized at once: their fp32 copies take 64 MiB each."""


_known: dict[tuple[object, ...], tuple[int, bool]] = {}
"""Signature of a weight, and whether torch's product is the best for it, by all that these follow
from."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """The weight of a linear in 8 bits.

    Attributes:
        data: `(N, K)` contiguous, int8 or FP8.
        scale: `(N,)` fp32, one an output channel, or a scalar (`fp8_tensor`).
        kernel: the kernel that multiplies it.
        smooth: `(K,)` fp32 that input channels are divided by, and the weight was multiplied by;
            `None` for none.
        rotation: input channels of a block that is rotated, in the weight and in the input.
        offset: `(N,)` fp32 of an asymmetric weight, else `None`.
        sums: `(N,)` fp32 sums of the rows of `data` of an asymmetric weight, else `None`.
        row_format: the format of the rows that it is multiplied with.
        signature: a number for all that decisions follow from; equal where that is equal.
        best_by_torch: whether torch's FP8 product takes the weight, and is the fastest where it is.
        columns: `data` as `(K, N)`, and `scale` as `(1, N)`: how torch's product takes them.
    """

    data: torch.Tensor
    scale: torch.Tensor
    kernel: str
    smooth: torch.Tensor | None = None
    rotation: int = 0
    offset: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    row_format: RowFormat = field(init=False, repr=False)
    signature: int = field(init=False, repr=False)
    best_by_torch: bool = field(init=False, repr=False)
    columns: tuple[torch.Tensor, torch.Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        per_tensor, data = self.scale.dim() == 0, self.data
        form = RowFormat(data.dtype, per_tensor, self.rotation, self.offset is not None)
        about = (self.kernel, data.shape, form, data.device, self.smooth is None)
        columns = (data.t(), self.scale if per_tensor else self.scale[None, :])
        object.__setattr__(self, "row_format", form)
        found = _known.get(about)
        if found is None:
            found = _known.setdefault(about, (len(_known), _is_best_by_torch(data)))
        object.__setattr__(self, "signature", found[0])
        object.__setattr__(self, "best_by_torch", found[1])
        object.__setattr__(self, "columns", columns)

    @property
    def in_features(self) -> int:
        """Channels of the input."""
        return self.data.shape[1]

    @property
    def out_features(self) -> int:
        """Channels of the output."""
        return self.data.shape[0]

    @property
    def label(self) -> str:
        """Kernel, and what is done to input channels before: `int8_row+rotation=64`."""
        rotation = f"+rotation={self.rotation}" if self.rotation else ""
        return f"{self.kernel}{rotation}{'' if self.smooth is None else '+smoothing=true'}"

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors() if tensor is not None)

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return data, scale, smooth, offset and sums."""
        return (self.data, self.scale, self.smooth, self.offset, self.sums)

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """Return the weight on a device."""
        data, scale = self.data.to(device), self.scale.to(device)
        offset, sums = (None if one is None else one.to(device) for one in (self.offset, self.sums))
        smooth = None if self.smooth is None else smooth_on(data.device, self.smooth)
        return QuantizedWeight(data, scale, self.kernel, smooth, self.rotation, offset, sums)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the `(N, K)` weight that the 8-bit one stands for, without smoothing and rotation.

        Example:
            >>> quantize_weight(torch.eye(16), "int8_row").dequantized().diagonal().sum()
            tensor(16.)
        """
        scale = self.scale if self.scale.dim() == 0 else self.scale[:, None]
        values = self.data.float() * scale
        if self.offset is not None:
            values = values + self.offset[:, None]
        values = rotated(values, self.rotation)
        return (values if self.smooth is None else values / self.smooth).to(dtype)


def shape_or_type(given: object) -> str:
    """Tell what was given in place of a tensor that fits.

    Example:
        >>> shape_or_type(torch.ones(2, 3)), shape_or_type([1.0])
        ('(2, 3)', 'list')
    """
    return str(tuple(given.shape)) if isinstance(given, torch.Tensor) else type(given).__name__


_elsewhere: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Factors of smoothing on other devices. Rows are remembered by the very tensor of factors, so that
linears that share it share their quantized input too, wherever they go."""


def smooth_on(device: torch.device, smooth: torch.Tensor) -> torch.Tensor:
    """Return factors of smoothing on a device, the same fp32 tensor for each linear with them."""
    if smooth.dtype != torch.float32 or smooth.requires_grad or not smooth.is_contiguous():
        smooth = smooth.detach().float().contiguous()
    if smooth.device == device:
        return smooth
    places: dict[torch.device, torch.Tensor] = _elsewhere.setdefault(smooth, {})
    if device not in places:
        places[device] = smooth.to(device)
    return places[device]


def _is_best_by_torch(data: torch.Tensor) -> bool:
    rows, channels = data.shape
    if data.dtype == torch.int8 or (rows | channels) % torch_alignment(int8=False):
        return False
    return device.facts_of(data.device.type, data.device.index).arch in TORCH_FP8_FASTEST


def quantize_weight(
    weight: torch.Tensor,
    kernel: str,
    *,
    smooth: torch.Tensor | None = None,
    rotation: int = 0,
    asymmetric: bool = False,
) -> QuantizedWeight:
    """Quantize the weight of a linear, one scale an output channel.

    Args:
        weight: `(N, K)` on the device that multiplies it, any floating type.
        kernel: `"fp8_row"`, `"fp8_tensor"` (one scale in all) or `"int8_row"`.
        smooth: `(K,)` positive factors that move outliers of the input into the weight, as
            `smoothing` finds them.
        rotation: input channels of a block that is rotated, which spreads outliers over it; a power
            of two from 16 to 256 that divides K, 0 for none.
        asymmetric: with an offset a row, of weight and inputs (`int8_row`).

    Raises:
        UnknownKernelError: the kernel does not exist or does not quantize.
        UnsupportedInputError: shapes or options that do not fit.

    Example:
        >>> quantize_weight(torch.randn(32, 64), "fp8_row").nbytes
        2176
    """
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or weight.numel() == 0:
        raise UnsupportedInputError(
            f"weight is {shape_or_type(weight)}; it needs two dimensions, (out_features, "
            "in_features)"
        )
    if not weight.is_floating_point() or weight.layout is not torch.strided:
        raise UnsupportedInputError(
            f"weight is {weight.dtype} of layout {weight.layout}; only dense floating tensors can "
            "be quantized"
        )
    facts = device.facts_of(weight.device.type, weight.device.index)
    fp8 = getattr(torch, facts.fp8_dtype or "float8_e4m3fn")
    form = row_format(kernel, fp8=fp8, rotation=rotation, asymmetric=asymmetric)
    channels = weight.shape[1]
    if rotation and channels % rotation:
        raise UnsupportedInputError(f"rotation {rotation} does not divide {channels} in_features")
    if smooth is not None:
        if not isinstance(smooth, torch.Tensor) or smooth.shape != (channels,):
            raise UnsupportedInputError(
                f"smooth is {shape_or_type(smooth)}; it needs a tensor of one factor for each of "
                f"{channels} in_features"
            )
        smooth = smooth_on(weight.device, smooth)
        if not ((smooth > 0.0) & smooth.isfinite()).all():
            raise UnsupportedInputError("smooth has factors that are not above 0 and finite")
    with torch.no_grad():
        return _quantized(weight.detach(), kernel, form, smooth)


def _quantized(
    weight: torch.Tensor, kernel: str, form: RowFormat, smooth: torch.Tensor | None
) -> QuantizedWeight:
    # The weight is multiplied by what its input is divided by.
    inverse = None if smooth is None else 1.0 / smooth
    if form.per_tensor:
        whole = quantized_rows(weight, form, inverse)
        return QuantizedWeight(whole.data, whole.scale, kernel, smooth, form.rotation)
    step = max(1, CHUNK_VALUES // weight.shape[1])
    chunks = [quantized_rows(part, form, inverse) for part in weight.split(step)]
    offset, sums = None, None
    if form.asymmetric:
        offset = torch.cat([part.offset[:, 0] for part in chunks if part.offset is not None])
        sums = torch.cat([part.sums[:, 0] for part in chunks if part.sums is not None])
    return QuantizedWeight(
        torch.cat([part.data for part in chunks]),
        torch.cat([part.scale[:, 0] for part in chunks]),
        kernel, smooth, form.rotation, offset, sums,
    )  # fmt: skip


def smoothing(
    largest: torch.Tensor, weight: torch.Tensor, *, strength: float = 0.5
) -> torch.Tensor:
    """Return the factors that even out the outliers of an input's channels.

    Source: SmoothQuant (arXiv 2211.10438) equation 4: `max|x_j|^s / max|w_j|^(1 - s)`.

    Args:
        largest: `(K,)` largest magnitude of each input channel.
        weight: `(N, K)`.
        strength: how much of the outliers moves into the weight, from 0 to 1.

    Returns:
        `(K,)` fp32, 1 where a channel of input or weight is all zero.

    Raises:
        UnsupportedInputError: shapes that do not fit, or a strength outside of 0 to 1.

    Example:
        >>> smoothing(torch.tensor([4.0, 1.0]), torch.tensor([[1.0, 1.0]]))
        tensor([2., 1.])
    """
    tensors = isinstance(largest, torch.Tensor) and isinstance(weight, torch.Tensor)
    if not tensors or largest.shape != weight.shape[1:] or not 0.0 <= strength <= 1.0:
        raise UnsupportedInputError(
            f"largest is {shape_or_type(largest)}, weight {shape_or_type(weight)} and strength "
            f"{strength}; they need to be (K,), (N, K) and between 0 and 1"
        )
    of_input = largest.detach().float()
    if not ((of_input >= 0.0) & of_input.isfinite()).all():
        raise UnsupportedInputError(
            "largest has magnitudes that are below 0 or not finite; give x.abs().amax(0) of "
            "inputs that are finite"
        )
    of_weight = weight.detach().abs().amax(0).to(of_input)
    factors = of_input**strength / of_weight ** (1.0 - strength)
    return torch.where((of_input > 0.0) & (of_weight > 0.0), factors, 1.0)
