"""Believed configs against the default: what loses is demoted, what cannot be judged is left."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sage_plugin import device
from sage_plugin.errors import CaptureError, ConfigError
from sage_plugin.families import ATTENTION
from sage_plugin.registry import load
from sage_plugin.tune.configs import inputs
from sage_plugin.tune.configs.inputs import TuningInputs
from sage_plugin.tune.configs.plan import TuningRequest
from sage_plugin.tune.configs.session import tune
from sage_plugin.tune.held import recheck, runs
from sage_plugin.tune.run import run_folder
from tests.registry import samples
from tests.tune import captures
from tests.tune.captures import GROUPED, SELF
from tests.tune.scripted import ScriptedRunner

CPU = device.facts("cpu")
KEY = samples.key(variant="emulation", seq_q=256, seq_k=256)
DEFAULT = ATTENTION.default_launch(KEY, CPU)
HELD = DEFAULT.replaced(block_n=64)
NEVER_CLEAN = dataclasses.replace(samples.evidence(), synthetic=True)


def request(tmp_path, **changes) -> TuningRequest:
    return TuningRequest(
        TuningInputs(()), device="cpu", config_dir=tmp_path / "c", runs_dir=tmp_path / "runs",
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("held_ms", "config", "confirmed"), [(0.8, HELD, False), (1.2, DEFAULT, True)]
)
def test_a_held_config_is_renewed_or_demoted(tmp_path, held_ms, config, confirmed):
    entry = samples.entry(KEY, HELD, because=NEVER_CLEAN)
    path = load.file_path(tmp_path / "c", CPU.slug)
    samples.merged(path, entry, facts=CPU)
    plan = recheck.build([recheck.held(entry, str(path))], request(tmp_path))
    (study,) = plan.studies
    assert (study.key, study.space) == (KEY, (DEFAULT, HELD))
    runner = ScriptedRunner(lambda one: held_ms if one == HELD else 1.0)
    report = tune(plan, runner)
    (now,) = load.read(path).entries
    assert (now.config, now.evidence.confirmed) == (config, confirmed)
    assert now.evidence.toolchain == device.toolchain()
    assert report.outcomes[0].written == "replaced"


def test_what_was_tuned_on_captures_is_measured_on_captures_alone(tmp_path):
    folder = captures.write(tmp_path / "captured_inputs", [(SELF, (0, 1)), (GROUPED, (0, 1))])
    decision = ATTENTION.decide(SELF, CPU, kernel="sage")
    recorded = ATTENTION.call_key(SELF, decision)
    mine, other = (
        recheck.held(samples.entry(key, HELD.replaced(block_m=64)), "here")
        for key in (recorded, KEY)
    )
    given = dataclasses.replace(request(tmp_path), inputs=inputs.from_captures(folder))
    plan = recheck.build([mine, other], given)
    (study,) = plan.studies
    assert study.key == recorded
    assert not study.synthetic
    assert [note for note in plan.notes if "tuned on captures" in note]


def test_nothing_to_measure_is_said(tmp_path):
    other = recheck.held(samples.entry(KEY, HELD), "here")
    with pytest.raises(CaptureError, match="tuned on captures, and none of such a call were given"):
        recheck.build([other], request(tmp_path))
    with pytest.raises(CaptureError, match="there are no configs"):
        recheck.build([], request(tmp_path))


def test_fields_that_are_not_given_are_the_defaults(tmp_path):
    one = recheck.Believed(
        "sage", ATTENTION.shape_of(KEY), {"block_n": 64, "num_warps": 8}, "x.json"
    )
    plan = recheck.build([one], request(tmp_path), "import")
    (study,) = plan.studies
    assert study.space[1] == study.default.replaced(block_n=64, num_warps=8)
    assert plan.run_folder.name.startswith("import-")


def test_a_run_is_read_back_as_configs(tmp_path):
    one = recheck.Believed("sage", ATTENTION.shape_of(KEY), {"block_n": 64}, "x.json")
    plan = recheck.build([one], request(tmp_path, update=False))
    tune(plan, ScriptedRunner(lambda config: 0.5 if config.block_n == 64 else 1.0))
    assert not plan.registry_path.exists(), "it was measured only"
    assert runs.is_run(plan.run_folder)
    file = runs.results_of(plan.run_folder)
    assert (file.device, file.toolchain) == (CPU, device.toolchain())
    (entry,) = file.entries
    assert (entry.config.block_n, entry.key.kernel) == (64, "sage")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (run_folder.RESULTS, "{", "not valid JSON"),
        (run_folder.RESULTS, "[]", "expected a JSON object"),
        (run_folder.RESULTS, "{}", "no 'results'"),
        (run_folder.RESULTS, '{"results": [{"entry": {}}]}', "'key' is missing"),
        (run_folder.METADATA, "{}", "no 'device'"),
        (run_folder.METADATA, None, "no such file"),
    ],
)
def test_a_damaged_run_is_named(tmp_path, name, text, says):
    facts, tools = CPU.to_json(), device.toolchain().to_json()
    content = {
        run_folder.RESULTS: '{"results": []}',
        run_folder.METADATA: json.dumps({"device": facts, "toolchain": tools}),
    } | {name: text}
    for file, one in content.items():
        if one is not None:
            (tmp_path / file).write_text(one)
    with pytest.raises(ConfigError, match=says):
        runs.results_of(tmp_path)
