"""`benchmarks/policy_geometry.py` and `policy_llm.py`: rules on a larger model, and sums."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("diffusers")

from sage_plugin.plugin.policy.rules import SCHEMA_VERSION, Policy, Rule

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

SMALL = Policy(
    SCHEMA_VERSION,
    (
        Rule("fav3_fp8", layers=("t.0.attn",), steps="50%:"),
        Rule("fav3_sage", layers=("t.0.attn",), steps=":50%"),
        Rule("sage", layers=("t.1.attn",), launch={"hadamard": 64}),
    ),
)


@pytest.fixture
def geometry() -> ModuleType:
    return importlib.import_module("policy_geometry")


def test_layers_are_spread_by_depth_and_bands_become_policies(geometry: ModuleType) -> None:
    bands = geometry.per_band(SMALL, ["a", "b", "c", "d"], steps=4)
    assert list(bands) == ["0,1", "2,3"]
    first, last = bands.values()
    assert [(r.kernel, r.layers) for r in first.rules] == [
        ("fav3_sage", ("a", "b")),
        ("sage", ("c", "d")),
        ("sdpa", ("*",)),
    ]
    assert [r.kernel for r in last.rules] == ["fav3_fp8", "sage", "sdpa"]
    assert first.rules[1].launch == {"hadamard": 64}


def test_a_step_is_predicted_from_the_calls_alone(
    geometry: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "policy.json"
    policy.write_text(SMALL.text().replace("t.1.attn", "t.0.attn2"))
    out = tmp_path / "out.json"
    words = [str(policy), "--output", str(out), "--tiny", "--budget", "0.5", "--steps", "2"]
    assert geometry.main([*words, "--commit", "abc"]) == 0
    found = json.loads(out.read_text())
    for row in found["bands"]:
        saved = sum(
            n * (found["call_ms"]["sdpa"] - found["call_ms"][k]) for k, n in row["layers"].items()
        )
        assert row["predicted_ms"] == pytest.approx(found["step_ms"]["unpatched"] - saved)
        assert row["ms"] == found["step_ms"][row["steps"]]
    mean = sum(row["ms"] for row in found["bands"]) / len(found["bands"])
    assert found["mean"]["ms"] == pytest.approx(mean)
    assert "mean of 2 steps" in capsys.readouterr().out


def test_perplexity_is_of_the_next_token_passage_by_passage() -> None:
    llm = importlib.import_module("policy_llm")
    prompt = torch.tensor([[0, 1, 1], [1, 0, 0]])
    sure = torch.nn.functional.one_hot(prompt.roll(-1, 1), 2).flatten(0, 1) * 50.0
    assert llm.perplexity(sure, prompt) == pytest.approx(1.0)
    assert llm.perplexity(torch.zeros(6, 2), prompt) == pytest.approx(2.0)


@pytest.mark.parametrize("name", ["w0_02", "w0_03", "p0_02"])
def test_policies_that_were_proved_fit_the_embedded_model(name: str) -> None:
    """And say what their proof says: patching refuses rules that name no layer."""
    import sage_plugin
    from sage_plugin.demo import load_pipeline
    from sage_plugin.plugin.policy.rules import read

    policy = read(RESULTS / f"policy_{name}_h200_2026-11-28.json")
    proof = json.loads((RESULTS / f"policy_proof_{name}_h200_2026-11-28.json").read_text())
    with sage_plugin.patched(load_pipeline(), policy=policy) as handle:
        assert len(handle.layers) == 4
        assert len(handle.report().idle_rules) == len(policy.rules)  # none was met yet
    assert policy.prediction is not None
    predicted = {run.name: run for run in policy.prediction.runs}
    for row in proof["rows"]:
        assert row["predicted_ms"] == predicted[row["name"]].ms
    saved = predicted["sdpa"].ms - predicted["policy"].ms
    assert sum(rule.saved_ms or 0.0 for rule in policy.rules) == pytest.approx(saved, abs=0.01)
    assert proof["gain_over_front_db"] > 0
