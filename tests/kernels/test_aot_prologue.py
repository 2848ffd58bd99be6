"""The prologue compiled ahead of time for GPUs that are not here: it fits, with hardly a spill."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")

from sage_plugin.kernels.support import ARCHITECTURES  # noqa: E402
from scripts.aot_prologue import FORMS, numbers_of  # noqa: E402
from tests.kernels.ahead_of_time import compiled_by  # noqa: E402

SPILL_LIMIT_BYTES = 16
"""A value or two, which ptxas puts aside on sm_100."""
EVERY = [row.names[0] for row in ARCHITECTURES if row.kernels and row.triton == "3.6"]


def check(*architectures: str) -> None:
    """Every form compiles for some architectures, with each type that Q has there."""
    made = compiled_by("aot_prologue", *architectures)
    assert len(made) == len(FORMS) * sum(len(numbers_of(arch)) for arch in architectures)
    for one in made:
        assert one["smem_bytes"] <= one["limit_bytes"], one
        assert one["spill_bytes"] <= SPILL_LIMIT_BYTES, one
        assert one["registers"] <= 232, one


def test_every_form_compiles_and_fits():
    check("sm_90")


@pytest.mark.sweep
@pytest.mark.parametrize("arch", EVERY)
def test_every_form_compiles_for_every_architecture(arch):
    check(arch)
