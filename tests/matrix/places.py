"""Where the rows of the matrix are tried: emulations, torch's own kernels, interpreter and GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import sage_plugin
from tests.gpu.variants import config_of, skip_what_is_left
from tests.kernels.calls import EMULATED, HOPPER, LIMITS, draw, launch
from tests.matrix.row import Case, Row

OF_TORCH = ("torch", "sdpa", "auto")
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
MARKS = {"gpu": ON_GPU, "hopper": ON_GPU}
BF16_WEIGHTS = 6e-3
"""Error of `fav2` where it rounds its weights to bf16."""


@dataclass(frozen=True)
class Place:
    """A device and a backend."""

    name: str
    variant: str | None

    @property
    def device(self) -> str:
        return "cuda" if self.name in ("gpu", "hopper") else "cpu"

    def kernels(self, row: Row) -> tuple[str, ...]:
        """The kernels of a row that run there."""
        if self.name == "torch":
            return OF_TORCH if row.kernels == EMULATED else ()
        if self.name == "hopper":
            return tuple(kernel for kernel in row.kernels if kernel in HOPPER)
        return row.kernels

    def swept(self, row: Row, at: int) -> tuple[str, ...]:
        """Those that a sweep tries; the interpreter `fav2` and one of the others in turn.

        Args:
            at: the place of the row in the table.
        """
        kernels = self.kernels(row)
        if row.everywhere or self.name != "interpreter":
            return kernels
        others = [kernel for kernel in kernels if kernel != "fav2"]
        return (*({*kernels} - {*others}), *others[at % max(1, len(others)) :][:1])

    def sampled(self, row: Row, at: int) -> tuple[str, ...]:
        """Those that every run tries: one in turn where a cell costs seconds, `fav2` each other."""
        kernels = self.swept(row, at)
        if row.everywhere or self.name in ("emulation", "torch"):
            return kernels
        others = [kernel for kernel in kernels if kernel != "fav2"]
        if "fav2" in kernels and (at % 2 == 0 or not others):
            return ("fav2",)
        return tuple(others[at // 2 % max(1, len(others)) :][:1])

    def case(self, row: Row) -> Case:
        """The call of a row, the same on every device."""
        shape = row.large if row.large and self.device == "cuda" else row.small
        dtypes = row.dtype if isinstance(row.dtype, tuple) else (row.dtype,) * 3
        tensors = (x.to(self.device, d) for x, d in zip(draw(shape), dtypes, strict=True))
        options = {
            name: value(shape).to(self.device) if name == "sinks" else value
            for name, value in row.options.items()
        }
        mask = None if row.mask is None else row.mask(shape).to(self.device)
        case = row.change(Case(*tensors, mask, options))
        if self.name == "torch":  # in fp32, so that it is held to digits that fp16 does not have
            case = case.each(torch.Tensor.float)
            if mask is not None and mask.dtype != torch.bool:
                case = case.but(mask=mask.float())
        return case

    def options(self, kernel: str, row: Row, case: Case) -> dict[str, Any]:
        """How the kernel is called, beside the options of the case."""
        if self.name == "torch":
            return {"kernel": kernel}
        if self.device == "cpu":
            # One kernel reads by descriptors, where it is free to choose.
            loads = "descriptor" if kernel == "fav3_sage" else "pointer"
            blocks = {"block_m": 32, "block_n": 32, "loads": loads} | row.launch
            return {"kernel": kernel, "variant": self.variant, "launch": launch(**blocks)}
        causal = case.options.get("is_causal", False)
        config = config_of(
            kernel, self.variant, case.q, case.k, case.v, causal=causal, mask=case.mask,
            **row.launch,
        )  # fmt: skip
        return {"kernel": kernel, "variant": self.variant, "launch": config}

    def answer(self, kernel: str, row: Row, case: Case, **more: Any) -> Any:
        """What the kernel makes of a case."""
        options = case.options | self.options(kernel, row, case) | more
        return sage_plugin.attention(case.q, case.k, case.v, case.mask, **options)


PLACES = {
    "emulation": Place("emulation", "emulation"),
    "torch": Place("torch", None),
    "interpreter": Place("interpreter", "portable"),
    "gpu": Place("gpu", "portable"),
    "hopper": Place("hopper", "hopper"),
}


def cells(names: dict[str, Row], places: Iterable[str]) -> list[Any]:
    """The name of a row, a kernel and the name of a place, for each kernel that is tried there.

    Triton's interpreter and a GPU run a sample of them, and more in a sweep.
    """
    made = []
    for place in (PLACES[name] for name in places):
        for at, (name, row) in enumerate(names.items()):
            sampled = place.sampled(row, at)
            for kernel in place.swept(row, at):
                marks = [*MARKS.get(place.name, [])]
                marks += [] if kernel in sampled else [pytest.mark.sweep]
                label = f"{name}-{kernel}-{place.name}"
                made.append(pytest.param(name, kernel, place.name, id=label, marks=marks))
    return made


def limit_of(kernel: str, row: Row) -> float:
    """Largest relative L1 error of a kernel on a row."""
    if kernel in OF_TORCH:
        return 3e-5 * row.times
    dtypes = row.dtype if isinstance(row.dtype, tuple) else (row.dtype,)
    rounded = kernel == "fav2" and torch.bfloat16 in dtypes
    return row.times * (BF16_WEIGHTS if rounded else LIMITS[kernel])


def skip_unsupported(kernel: str, place: Place, row: Row, case: Case) -> None:
    """Skip what a backend leaves to another, and options that a kernel does not have."""
    if place.name == "hopper":
        special = bool({"window", "softcap", "sinks"} & {*case.options})
        rows = case.mask is not None and case.mask.dim() > 1 and case.mask.shape[-2] > 1
        heads = case.mask is not None and case.mask.dim() > 2 and case.mask.shape[-3] > 1
        kind = "none" if case.mask is None else "dense" if rows else "key_bias"
        if {*row.launch} - {"hadamard", "q_granule", "smooth_k", "smooth_v"}:
            pytest.skip("its launch configs have other blocks")
        skip_what_is_left(
            kernel, "hopper", case.q.shape[3], special=special or heads, mask_kind=kind
        )


def distance(found: torch.Tensor, wanted: torch.Tensor, visible: torch.Tensor) -> float:
    """Return the largest error of an LSE, relative to those that are large."""
    error = (found.double() - wanted)[visible].abs() / wanted[visible].abs().clamp_min(1.0)
    return error.max().item() if error.numel() else 0.0


def hold(
    kernel: str, row: Row, case: Case, out: torch.Tensor, lse: torch.Tensor,
    wanted: torch.Tensor, wanted_lse: torch.Tensor,
) -> None:  # fmt: skip
    """Check that an answer is within the kernel's limit, and exact in rows that see nothing."""
    assert out.isfinite().all()
    visible = wanted_lse.isfinite()
    assert torch.equal(lse.isfinite(), visible)
    assert (out[wanted_lse == -torch.inf] == 0).all()
    # The floor keeps calls of a few keys, whose outputs may nearly cancel, from being judged.
    size = wanted.abs().mean() + 0.1 * case.v.double().nan_to_num().abs().mean() + 1e-37
    error = ((out.double() - wanted).abs().mean() / size).item()
    assert error <= limit_of(kernel, row), f"{kernel}: {error:.5f}"
    spread = max(1.0, 8 * abs(case.options.get("scale") or 0.0))
    loose = {"fav3_fp8": 0.3}.get(kernel, 0.1) * max(1.0, row.times / 3) * spread
    assert distance(lse, wanted_lse, visible) < (1e-4 if kernel in OF_TORCH else loose)
