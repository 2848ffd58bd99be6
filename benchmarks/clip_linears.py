"""PSNR and SSIM of demo clips with attention, linears, or both on quantized kernels.

Each clip is drawn from the same noise as the unpatched one. On a CPU kernels are emulated, and a
digit takes minutes.

    python benchmarks/clip_linears.py [--digits 3 7 8] [--steps 8] [--device cpu]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import sage_plugin
from sage_plugin.demo import load_pipeline
from sage_plugin.demo.quality import Quality, quality

VARIANTS: dict[str, dict[str, str]] = {
    "attention fav3_fp8": {"kernel": "fav3_fp8"},
    "linears fp8_row": {"kernel": "sdpa", "linears": "fp8_row"},
    "linears int8_row": {"kernel": "sdpa", "linears": "int8_row"},
    "fav3_fp8 and fp8_row": {"kernel": "fav3_fp8", "linears": "fp8_row"},
    "sage and int8_row": {"kernel": "sage", "linears": "int8_row"},
}


def measured(digits: Sequence[int], steps: int, device: str) -> dict[str, list[Quality]]:
    """Draw a clip of each digit with each variant, beside the unpatched one."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    pipe = load_pipeline(device=device, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)

    def draw(digit: int) -> np.ndarray[Any, Any]:
        generator = torch.Generator().manual_seed(digit)
        drawn = pipe(digit, num_inference_steps=steps, generator=generator, output_type="np")
        frames: np.ndarray[Any, Any] = drawn.frames[0]
        return frames

    rows: dict[str, list[Quality]] = {name: [] for name in VARIANTS}
    for digit in digits:
        plain = draw(digit)
        for name, options in VARIANTS.items():
            with sage_plugin.patched(pipe, min_seq=0, **options):  # type: ignore[arg-type]
                rows[name].append(quality(draw(digit), plain))
    return rows


def lines_of(rows: dict[str, list[Quality]]) -> list[str]:
    """A line for each variant: the means over the clips, and the worst frame of all."""
    lines = []
    for name, clips in rows.items():
        psnr = statistics.fmean(clip.mean_psnr_db for clip in clips)
        worst = min(clip.min_psnr_db for clip in clips)
        ssim = statistics.fmean(clip.summary()["mean_ssim"] for clip in clips)
        lines.append(f"{name:22} PSNR {psnr:5.2f} dB (worst frame {worst:5.2f})  SSIM {ssim:.4f}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--digits", type=int, nargs="+", default=[3, 7, 8])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    print(*lines_of(measured(args.digits, args.steps, args.device)), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
