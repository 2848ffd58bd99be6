"""Rules say the same as the choice that they were made from."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from sage_plugin.plugin.policy.rules import SCHEMA_VERSION, Policy, checked
from sage_plugin.plugin.policy.step_range import equal_bands
from sage_plugin.tune.policy.grid import Estimate
from sage_plugin.tune.policy.option import Option
from sage_plugin.tune.policy.rules import rules_of
from tests.tune.policy import recordings
from tests.tune.policy.recordings import SHAPE

OPTIONS = (Option("sage"), Option("fav3_sage"), Option.parse("fav3_sage+hadamard=32"))
PICKS = {"sdpa": Estimate("sdpa", 0.0, 4.0)} | {
    option.label: Estimate(option.label, 0.01 * i, 4.0 - i, (f"{i}.safetensors",))
    for i, option in enumerate(OPTIONS, start=1)
}


def chosen_of(grid, labels):
    return [
        (dataclasses.replace(cell, estimates=(PICKS["sdpa"], PICKS[label])), PICKS[label])
        for cell, label in zip(grid.cells.values(), labels, strict=False)
    ]


@settings(max_examples=150)
@given(data=st.data(), layers=st.integers(1, 12), count=st.integers(1, 5), more=st.integers(0, 20))
def test_every_layer_and_step_gets_what_was_chosen_from_one_rule_at_most(data, layers, count, more):
    steps = data.draw(st.none() | st.just(count + more))
    bands = equal_bands(count, steps)
    places = st.tuples(st.integers(0, layers - 1), st.integers(0, len(bands) - 1))
    missing = data.draw(st.sets(places, max_size=layers))
    grid = recordings.grid(layers, bands, steps, tuple(missing))
    labels = data.draw(st.lists(st.sampled_from(list(PICKS)), min_size=60, max_size=60))
    chosen = chosen_of(grid, labels)
    rules = rules_of(grid, chosen, OPTIONS)
    if rules:
        checked(Policy(SCHEMA_VERSION, rules), "the rules")
    for layer in grid.layers:
        for step in range(steps or 1):
            fits = [r for r in rules if r.names(layer) and r.band.contains(step, steps)]
            assert len(fits) <= 1
            for cell, pick in chosen:
                if cell.layer == layer and _within(cell.steps, step, steps):
                    name = (fits[0].kernel, fits[0].launch) if fits else ("sdpa", {})
                    host = pick.label == "sdpa"
                    option = Option("sdpa") if host else Option.parse(pick.label)
                    assert name == (option.name, option.fields)
                    assert not fits or fits[0].fits(SHAPE.seq_q, SHAPE.seq_k)
    saved = sum(rule.saved_ms for rule in rules)
    assert abs(saved - sum(4.0 - pick.ms for _, pick in chosen)) < 1e-3
    assert [r.saved_ms for r in rules] == sorted((r.saved_ms for r in rules), reverse=True)


def _within(band, step, steps):
    from sage_plugin.plugin.policy.step_range import Band

    return Band.parse(band).contains(step, steps)


def test_layers_and_bands_of_one_option_share_a_rule_with_its_evidence():
    grid = recordings.grid(2, (":50%", "50%:"), 4)
    a, b = "sage", "fav3_sage+hadamard=32"
    first, second = rules_of(grid, chosen_of(grid, [a, b, "sdpa", b]), OPTIONS)
    assert (first.kernel, first.launch, first.steps) == ("fav3_sage", {"hadamard": 32}, "50%:")
    assert first.layers == grid.layers
    assert (first.saved_ms, first.error, first.captures) == (6.0, 0.03, ("3.safetensors",))
    assert (second.kernel, second.layers, second.steps) == ("sage", grid.layers[:1], ":50%")


def test_a_run_of_bands_is_one_rule_and_all_bands_need_no_steps():
    grid = recordings.grid(1, (":25%", "25%:50%", "50%:75%", "75%:"), 4)
    (rule,) = rules_of(grid, chosen_of(grid, ["sdpa", "sage", "sage", "sdpa"]), OPTIONS)
    assert rule.steps == "25%:75%"
    (rule,) = rules_of(grid, chosen_of(grid, ["sage"] * 4), OPTIONS)
    assert rule.steps == ""


def test_the_hosts_attention_needs_no_rule():
    grid = recordings.grid(2, ("",), None)
    assert rules_of(grid, chosen_of(grid, ["sdpa", "sdpa"]), OPTIONS) == ()
