"""The embedded video model: a small CogVideoX transformer that draws bouncing digits, offline.

The weights ship inside the package, so the whole path (record, tune, bench, patch) can be shown on
a real diffusion model without a download. Nothing here needs a GPU; `diffusers` is imported by
`model` and `pipeline` only, Pillow by `film` only. The
runtime (`kernels`, `plugin`, `registry`) never imports this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sage_plugin.demo.pipeline import DigitVideoPipeline, load_pipeline
    from sage_plugin.demo.sizes import SIZES, DemoSize

__all__ = ["SIZES", "DemoSize", "DigitVideoPipeline", "load_pipeline"]

_HOMES = {
    "SIZES": "sizes",
    "DemoSize": "sizes",
    "DigitVideoPipeline": "pipeline",
    "load_pipeline": "pipeline",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import the public names on first use, so that importing this package costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
