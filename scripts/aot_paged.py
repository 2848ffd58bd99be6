"""One call of paged attention on a GPU that is not here, for `scripts/aot_builds.py`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from sage_plugin.families.paged_attention.ahead_of_time import empty_call
from sage_plugin.kernels.paged_attention import launch_space
from sage_plugin.kernels.paged_attention.validate import checked_call
from sage_plugin.paged_records import PagedKey, PagedLaunch, PagedShape
from sage_plugin.schema import DeviceFacts
from scripts.aot_linears import facts_of

ROWS = {"decode": (1, 1, 1, 1), "prefill": (512,), "mixed": (1, 1, 1, 64)}
KEYS = 4096


@dataclass(frozen=True)
class PagedBuild:
    """One call on one architecture.

    Attributes:
        paged: kernel.
        form: decode, prefill or mixed.
        cache: dtype of the caches, `"fp8"` for the device's own.
        launch: fields changed in the default launch config.
    """

    paged: str
    arch: str
    dim: int
    form: str = "decode"
    dtype: str = "bfloat16"
    cache: str = "bfloat16"
    page_size: int = 64
    launch: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> DeviceFacts:
        """The device."""
        return facts_of(self.arch)

    def shape(self) -> PagedShape:
        """The call, with four query heads for a key head."""
        rows = ROWS[self.form]
        cache = self.facts().fp8_dtype or "float8_e4m3fn" if self.cache == "fp8" else self.cache
        return PagedShape(
            rows, (KEYS,) * len(rows), 8, 2, self.dim, self.dtype, cache, self.page_size, KEYS
        )

    def key(self) -> PagedKey:
        """The call key."""
        return empty_call(self.shape()).launch_key(self.paged, "triton")

    def config(self) -> PagedLaunch:
        """The architecture's default, with the call's own changes."""
        return launch_space.default_launch(self.key(), self.facts()).replaced(**self.launch)

    def bound_bytes(self) -> int:
        """Shared memory that it needs at least."""
        return launch_space.smem_lower_bound(self.config(), self.key())

    def load(self) -> None:
        """Import what launches."""
        importlib.import_module("sage_plugin.kernels.paged_attention.backends.triton.launch")

    def run(self) -> None:
        """Launch; in a mixed batch, those that decode by their own default."""
        from sage_plugin.kernels.paged_attention.backends.triton.launch import PagedTriton

        call, few = empty_call(self.shape()), None
        if self.form == "mixed":
            decoding = call.launch_key(self.paged, "triton", "decode")
            few = launch_space.default_launch(decoding, self.facts())
        numbers, processors = checked_call(call), self.facts().sm_count
        PagedTriton(self.paged, numbers, self.config(), few, processors).run(call)
