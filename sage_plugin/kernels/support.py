"""Which hardware runs which kernel: a table, and one reason for whatever does not run.

A row claims no more than what compiles ahead of time with every Triton that the package allows
(`make compile-matrix`): each default config, inside the shared memory of the chip and on its matrix
units. Hardware without a row runs the host's attention.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sage_plugin import device
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.schema import KERNELS, DeviceFacts

LOWEST_TRITON = "3.6"
"""3.5 does not know sm_121, 3.4 cannot link for AMD, 3.3 has no tensor descriptors."""
NEWEST_TRITON = "3.9"
"""The newest that the matrix was compiled with; later ones are let through."""

LIKE_KERNELS = {
    "fp8_row": "fav3_fp8", "fp8_tensor": "fav3_fp8", "int8_row": "sage",
    "qk_fp8": "fav3_fp8", "qk_int8": "sage",
}  # fmt: skip
"""Quantized kernels of linears and of paged attention, each with one of attention that multiplies
the same numbers."""

FP8_KERNELS = ("fav3_sage", "fav3_fp8")
FP8_LINEARS = ("fp8_row", "fp8_tensor")
FP8_PAGED = ("qk_fp8",)
OF_TORCH = ("torch", "sdpa", "bf16")
"""Kernels that are torch's own and run everywhere."""
UNQUANTIZED = ("fav2", "sage")
"""The kernels that need no FP8 matrix units."""
ALL = (*UNQUANTIZED, *FP8_KERNELS)

TRITON_KERNELS = {
    "fav2": ("emulation", "portable"),
    "sage": ("emulation", "portable", "hopper"),
    "fav3_sage": ("emulation", "portable", "hopper"),
    "fav3_fp8": ("emulation", "portable", "hopper"),
}
"""Variants that are built, by kernel."""

ON_GPUS = ("portable", "hopper")
"""Variants of attention that are written in Triton."""

IN_TRITON = ("triton", *ON_GPUS)
"""Backends of all op families that are."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table: chips with the same instructions.

    Attributes:
        names: as in `DeviceFacts.arch`; the first stands for the others where one is enough.
        chips: products with it.
        smem_kib: shared memory that one program may use.
        kernels: kernels that run there.
        reason: why the others do not, after the name of the architecture.
        triton: the lowest Triton that compiles for it.
        note: what a user of it should know.
    """

    names: tuple[str, ...]
    chips: str
    smem_kib: int
    kernels: tuple[str, ...]
    reason: str = ""
    triton: str = LOWEST_TRITON
    note: str = ""

    @property
    def kind(self) -> str:
        """`"cuda"` or `"hip"`, as in `DeviceFacts.kind`."""
        return "hip" if self.names[0].startswith("gfx") else "cuda"

    def runs(self, kernel: str) -> bool:
        """Whether a kernel of any family runs there."""
        return LIKE_KERNELS.get(kernel, kernel) in self.kernels


NO_TENSOR_PRODUCT = (
    "has no INT8 tensor product in Triton, and its 16-bit ones run outside of the matrix units"
)
NO_FP8 = "has no FP8 matrix units"
INT8_OF_WARPS = "INT8 products are `mma.sync` before Triton 3.9"

ARCHITECTURES = (
    Architecture(("sm_75", "sm_70", "sm_72"), "T4, RTX 20, V100", 64, (), NO_TENSOR_PRODUCT),
    Architecture(("sm_80",), "A100, A30", 163, UNQUANTIZED, NO_FP8),
    Architecture(("sm_86",), "A10, RTX 30", 99, UNQUANTIZED, NO_FP8),
    Architecture(("sm_87",), "Jetson Orin", 163, UNQUANTIZED, NO_FP8),
    Architecture(("sm_89",), "L4, L40S, RTX 40", 99, ALL),
    Architecture(("sm_90",), "H100, H200, GH200", 227, ALL, note="tuned on an H100 and an H200"),
    Architecture(("sm_100",), "B200, GB200", 227, ALL, note=INT8_OF_WARPS),
    Architecture(("sm_103",), "B300, GB300", 227, ALL, note="INT8 products are `mma.sync`"),
    Architecture(
        ("sm_110",), "Jetson Thor", 227, ALL, triton="3.7", note="INT8 products are `mma.sync`"
    ),
    Architecture(("sm_120",), "RTX 50, RTX PRO 6000", 99, ALL),
    Architecture(
        ("sm_121",), "GB10", 99, ALL, note="FP8 products become FP16 ones before Triton 3.8"
    ),
    Architecture(("gfx908",), "MI100", 64, UNQUANTIZED, NO_FP8),
    Architecture(("gfx90a",), "MI210, MI250", 64, UNQUANTIZED, NO_FP8),
    Architecture(("gfx942",), "MI300, MI325", 64, ALL, note="its FP8 type ends at 240"),
    Architecture(("gfx950",), "MI350, MI355", 160, ALL),
    Architecture(("gfx1100", "gfx1101", "gfx1102", "gfx1103"), "RX 7000", 64, UNQUANTIZED, NO_FP8),
    Architecture(
        ("gfx1151", "gfx1150", "gfx1152", "gfx1153"), "Ryzen AI 300", 64, UNQUANTIZED, NO_FP8
    ),
    Architecture(("gfx1201", "gfx1200"), "RX 9000", 64, ALL),
)
_ROWS = {name: row for row in ARCHITECTURES for name in row.names}


def architecture(arch: str) -> Architecture | None:
    """The row of an architecture, or `None` where the table has none."""
    return _ROWS.get(arch)


HOPPER_ARCH = "sm_90"
TMA_ARCHS = ("sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")
HOPPER_HEAD_DIMS = (33, 128)
"""Smallest and largest head dim of the Hopper variants, whose tiles have 64 or 128 channels."""
HOPPER_MASK = FallbackReason(Fallback.HOPPER_MASK)
HOPPER_SPECIAL = FallbackReason(Fallback.HOPPER_SPECIAL)


def hopper_reason(
    kernel: str,
    facts: DeviceFacts,
    head_dim: int,
    *,
    mask_kind: str = "none",
    special: bool = False,
) -> FallbackReason | None:
    """Why the Hopper variant of a kernel does not take a call, or `None`.

    Args:
        kernel: a kernel.
        facts: the device.
        head_dim: channels of a head.
        mask_kind: kind of the call's mask.
        special: the call has a window, a cap, sinks, packed sequences or a bias of each head.
    """
    if "hopper" not in TRITON_KERNELS.get(kernel, ()):
        return FallbackReason(Fallback.NO_HOPPER_VARIANT, kernel)
    if facts.arch != HOPPER_ARCH:
        return FallbackReason(Fallback.HOPPER_ARCHITECTURE, (HOPPER_ARCH, facts.arch))
    if mask_kind not in ("none", "key_bias"):
        return HOPPER_MASK
    if special:
        return HOPPER_SPECIAL
    low, high = HOPPER_HEAD_DIMS
    if not low <= head_dim <= high:
        return FallbackReason(Fallback.HOPPER_HEAD_DIM, (low, high, head_dim))
    return None


def gpu_variant(
    kernel: str, head_dim: int, reason: FallbackReason | None, *, mask_kind: str = "none"
) -> str:
    """The faster variant of a kernel on a GPU, given why the Hopper one does not take a call.

    The portable one is with fp16 values and 64 channels (causal calls of 2,048 to 32,768 tokens
    take the other 1.09 to 1.36 times as long on an H200, others 0.99 to 1.13), and where a mask
    adds to scores, 532 to 412 TFLOPS at 64 channels and 814 to 590 at 128.
    """
    slower = (kernel == "sage" and head_dim <= 64) or mask_kind != "none"
    return "portable" if reason is not None or slower else "hopper"


TORCH_FP8 = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942", "gfx950")
"""Where `torch._scaled_mm` multiplies FP8 rows."""

TORCH_FP8_FASTEST = ("sm_90", "sm_100", "sm_103")
"""Where nothing of ours is faster: 1,310 to 1,480 TFLOPS on an H200, bf16 has 670 to 800 there."""


TORCH_GROUPED = {
    "bf16": ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103"),
    "fp8_row": ("sm_90",),
    "int8_row": (),
}
"""Where torch multiplies groups of rows without a look at their sizes, by kernel."""

TORCH_GROUPED_FASTEST: dict[str, tuple[str, ...]] = {"bf16": (), "fp8_row": (), "int8_row": ()}
"""Where nothing of ours is faster."""


def torch_alignment(*, int8: bool) -> int:
    """Return what in and out features are multiples of where torch's products take a weight."""
    return 8 if int8 else 16


def fewest_products(arch: str) -> float:
    """Products M x K x N of a linear under which torch's own 16-bit one is faster; 0 if unknown.

    In CUDA graphs on an H200, with the quantization: with 1536 x 1536 weights 0.96 times as fast at
    4.8e9 and 1.09 times at 9.7e9, with 4096 x 4096 ones 1.14 times at 4.3e9.
    """
    return 7e9 if arch == HOPPER_ARCH else 0.0


def fewest_out_features(arch: str) -> int:
    """Outputs of a linear under which quantizing its input takes what the product saves."""
    return 768 if arch == HOPPER_ARCH else 0


SHORTEST_CAUSAL = 7168
"""Tokens of a causal call under which SDPA is faster on an H200, whatever the heads: 0.92 to 0.97
times at 6,144, 1.07 to 1.09 at 8,192."""


SHORTEST = 1200
"""Tokens of any other call under which SDPA is faster on an H200, whatever the heads: with 512 keys
0.69 and 0.67 times at 32,760 and 75,600 queries of 40 heads. From what a row costs and what a key
saves there, both are equal at about as many."""

MOST_CHANNELS = 128
"""Channels of a head above which SDPA is faster on an H200, where no Hopper variant takes it: 3.4
times at 256 channels and 16,384 causal tokens."""


def fewest_operations(arch: str, head_dim: int) -> float:
    """Operations of a call under which SDPA is faster than quantisation and a kernel together.

    Where our kernels met SDPA's fastest backend in CUDA graphs of 8 and 24 heads on an H200
    (`benchmarks/short_calls.py`); 0 where nobody has measured.
    """
    if arch != HOPPER_ARCH:
        return 0.0
    return 5.5e10 if head_dim <= 64 else 1.5e11


def fewest_tokens(arch: str, *, causal: bool) -> int:
    """Tokens of a call, of queries and of keys, under which SDPA is faster; 0 where there are none.

    As `fewest_operations`, which holds beside it.
    """
    if arch != HOPPER_ARCH:
        return 0
    return SHORTEST_CAUSAL if causal else SHORTEST


def most_channels(arch: str) -> int | None:
    """Channels of a head above which SDPA is faster, in calls that it takes; `None` if unknown."""
    return MOST_CHANNELS if arch == HOPPER_ARCH else None


def device_reason(kernel: str, facts: DeviceFacts) -> FallbackReason | None:
    """Why a device cannot run a kernel, or `None`."""
    return _reason(kernel, facts.kind, facts.arch, facts.fp8_dtype)


def prologue_reason(facts: DeviceFacts) -> FallbackReason | None:
    """Why a device cannot run the prologue, norm and rotary embedding of Q and K, or `None`.

    It multiplies no tiles: whatever runs an unquantized kernel compiles it.
    """
    return device_reason("fav2", facts)


def _reason(kernel: str, kind: str, arch: str, fp8_dtype: str | None) -> FallbackReason | None:
    if kernel in OF_TORCH or kind == "cpu":
        return None
    if kind == "other":
        return FallbackReason(Fallback.DEVICE, arch)
    row = architecture(arch)
    if row is None or row.kind != kind:
        maker = "AMD" if kind == "hip" else "NVIDIA"
        return FallbackReason(Fallback.UNKNOWN_ARCHITECTURE, (arch, maker))
    version = device.triton_version()
    if not version:
        return FallbackReason(Fallback.NO_TRITON)
    if row.kernels and release(version) < release(row.triton):
        return FallbackReason(Fallback.OLD_TRITON, (arch, row.triton, version))
    if not row.runs(kernel):
        return FallbackReason(Fallback.ARCHITECTURE_LACKS, (arch, row.reason))
    if kernel in (*FP8_KERNELS, *FP8_LINEARS, *FP8_PAGED) and fp8_dtype is None:
        return FallbackReason(Fallback.ARCHITECTURE_LACKS, (arch, NO_FP8))
    return None


# A compiler sees it as a constant, as it does the facts (`dispatch.facts_of`).
vars(_reason)["_dynamo_marked_constant"] = True


def kernels_of(facts: DeviceFacts) -> tuple[str, ...]:
    """The kernels that a device can run, plainest first."""
    return tuple(k for k in KERNELS if device_reason(k, facts) is None)


def release(version: str) -> tuple[int, ...]:
    """Major and minor number of a version.

    Example:
        >>> release("3.6.0+git1234")
        (3, 6)
    """
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
