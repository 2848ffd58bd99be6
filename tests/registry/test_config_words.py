"""Two configs that differ in any field read differently."""

from __future__ import annotations

import dataclasses

import pytest

from sage_plugin.registry.config_words import config_lines, config_text
from sage_plugin.schema import LaunchConfig
from tests.registry.samples import CONFIG

OTHER = {bool: True, int: 16, str: "descriptor"}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(LaunchConfig)])
def test_every_field_that_differs_from_the_default_is_printed(field):
    value = getattr(CONFIG, field)
    changed = CONFIG.replaced(**{field: not value if value is True else OTHER[type(value)]})
    assert config_text(changed, CONFIG) != config_text(CONFIG, CONFIG) == "128x64 w4 s3"
    assert config_text(changed) != config_text(CONFIG) == "128x64 w4 s3 smooth_k pv_flush 1"
    assert config_lines(changed, CONFIG).replace("\n", " ") == config_text(changed, CONFIG)


def test_a_column_is_narrow_and_keeps_a_field_with_its_value():
    every = CONFIG.replaced(pv_flush=8, hadamard=64, q_granule=16, exp_linear=6, overlap=True)
    lines = config_lines(every, CONFIG).splitlines()
    assert lines == [
        "128x64 w4 s3",
        "pv_flush 8 hadamard 64",
        "q_granule 16",
        "exp_linear 6 overlap",
    ]
