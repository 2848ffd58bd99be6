"""Entries of two sides are paired by card and call."""

from __future__ import annotations

import dataclasses

from sage_plugin.registry.compare import differences
from tests.registry import samples


def test_sides_are_paired_by_card_and_call_and_equals_left_out():
    same, gone = samples.entry(samples.key(seq_q=1)), samples.entry(samples.key(seq_q=2))
    before, after = samples.entry(), samples.entry(launch=samples.config(block_m=64))
    renewed = dataclasses.replace(before, evidence=samples.evidence(0.2))
    first, second = samples.file(same, gone, before), samples.file(same, after)
    pairs = differences([first], [second])
    assert [(p.key.seq_q, p.first, p.second, p.same_config) for p in pairs] == [
        (2, gone, None, False),
        (1024, before, after, False),
    ]
    (only,) = differences([samples.file(before)], [samples.file(renewed)])
    assert only.same_config
    other = dataclasses.replace(samples.FACTS, slug="nvidia-h200")
    both = differences([first], [samples.file(*first.entries, facts=other)])
    assert [(p.slug, p.first is None) for p in both] == [
        *((samples.FACTS.slug, False),) * 3,
        *(("nvidia-h200", True),) * 3,
    ]
