"""Quantised attention for diffusers and transformers, with capture, tuning and benchmarks.

`patch(pipe)` makes a pipeline run its attention on quantised kernels; everything else is reached
through the `sage` command. Importing this package reads no file and loads none of its parts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "accelerate": "sage_plugin.plugin.accelerate",
    "Prologue": "sage_plugin.kernels.linear.rows.prologue",
    "QkNorm": "sage_plugin.kernels.attention.prologue.record",
    "Rope": "sage_plugin.kernels.attention.prologue.record",
    "attention": "sage_plugin.kernels.attention.api",
    "autotune": "sage_plugin.tune.autotune",
    "attention_varlen": "sage_plugin.kernels.attention.varlen",
    "continuous_batching": "sage_plugin.plugin.hosts.continuous_batching",
    "grouped_linear": "sage_plugin.kernels.grouped_linear.api",
    "launch": "sage_plugin.kernels.attention.prepare",
    "linear": "sage_plugin.kernels.linear.api",
    "normalized": "sage_plugin.kernels.linear.api",
    "paged_attention": "sage_plugin.kernels.paged_attention.api",
    "patch": "sage_plugin.plugin.patch",
    "patched": "sage_plugin.plugin.patch",
    "prepare": "sage_plugin.kernels.attention.prepare",
    "quantize_weight": "sage_plugin.kernels.linear.weight",
    "quantize_weights": "sage_plugin.kernels.grouped_linear.weight",
    "record": "sage_plugin.capture.recording.recorder",
    "refresh": "sage_plugin.plugin.patch",
    "register": "sage_plugin.plugin.hosts.registration",
    "report": "sage_plugin.plugin.report",
    "smoothing": "sage_plugin.kernels.linear.weight",
    "unpatch": "sage_plugin.plugin.patch",
}

__all__ = [
    "Prologue",
    "QkNorm",
    "Rope",
    "__version__",
    "accelerate",
    "attention",
    "attention_varlen",
    "autotune",
    "continuous_batching",
    "grouped_linear",
    "launch",
    "linear",
    "normalized",
    "paged_attention",
    "patch",
    "patched",
    "prepare",
    "quantize_weight",
    "quantize_weights",
    "record",
    "refresh",
    "register",
    "report",
    "smoothing",
    "unpatch",
]

if TYPE_CHECKING:
    from sage_plugin.capture.recording.recorder import record
    from sage_plugin.kernels.attention.api import attention
    from sage_plugin.kernels.attention.prepare import launch, prepare
    from sage_plugin.kernels.attention.prologue.record import QkNorm, Rope
    from sage_plugin.kernels.attention.varlen import attention_varlen
    from sage_plugin.kernels.grouped_linear.api import grouped_linear
    from sage_plugin.kernels.grouped_linear.weight import quantize_weights
    from sage_plugin.kernels.linear.api import linear, normalized
    from sage_plugin.kernels.linear.rows.prologue import Prologue
    from sage_plugin.kernels.linear.weight import quantize_weight, smoothing
    from sage_plugin.kernels.paged_attention.api import paged_attention
    from sage_plugin.plugin.accelerate import accelerate
    from sage_plugin.plugin.hosts.continuous_batching import continuous_batching
    from sage_plugin.plugin.hosts.registration import register
    from sage_plugin.plugin.patch import patch, patched, refresh, unpatch
    from sage_plugin.plugin.report import report
    from sage_plugin.tune.autotune import autotune


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Load a public name from its home on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'sage_plugin' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
