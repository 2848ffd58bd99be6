"""What is known of every op family, wherever it is asked for."""

from __future__ import annotations

import pytest

from sage_plugin import families
from sage_plugin.capture.ops import OPS
from sage_plugin.capture.store.checks import KINDS
from sage_plugin.paged_records import PAGED_ATTENTION
from sage_plugin.plugin.policy.rules import BASELINES


@pytest.mark.parametrize("known", [OPS, KINDS], ids=["recorded", "read"])
def test_every_family_is_known(known) -> None:
    assert set(known) == set(families._FAMILIES)


def test_policies_are_of_what_a_model_computes() -> None:
    """No layer or step chooses how a server's pages are read."""
    assert set(families._FAMILIES) - set(BASELINES) == {PAGED_ATTENTION}


@pytest.mark.parametrize("name", OPS)
def test_lines_of_a_family_are_read_as_they_are_written(name) -> None:
    assert OPS[name].record is KINDS[name].record
    assert families.family(name).name == name
