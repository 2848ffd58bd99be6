"""`benchmarks/step_times.py`: models of the size that they are named after, and who ran on what."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("diffusers")

PARAMETERS = {"cogvideox-2b": 1.69e9, "cogvideox-5b": 5.57e9, "wan-1.3b": 1.42e9,
              "wan-14b": 14.3e9, "flux-dev-1024": 11.9e9, "qwen-image": 20.4e9}  # fmt: skip
"""As their model cards say."""
CALLS = {"cogvideox-2b": 2, "cogvideox-5b": 2, "wan-1.3b": 4, "flux-dev-1024": 4,
         "qwen-image": 2}  # fmt: skip


def asked_for(*kernels: str, **options: object) -> argparse.Namespace:
    """Options of a run of tiny models on a CPU."""
    known = {"device": "cpu", "tiny": True, "budget": 0.1, "compiled": False, "layers": None,
             "config_dir": None}  # fmt: skip
    return argparse.Namespace(kernels=list(kernels), **(known | options))


@pytest.fixture
def step_models() -> ModuleType:
    return importlib.import_module("step_models")


@pytest.fixture
def step_times() -> ModuleType:
    return importlib.import_module("step_times")


@pytest.mark.parametrize("name", PARAMETERS)
def test_full_size_models_have_the_size_of_their_names(
    step_models: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    weights, counts = step_models.random_weights, []

    def on_meta(kind, config, device, dtype, generator):
        with torch.device("meta"):
            counts.append(sum(p.numel() for p in kind(**config).parameters()))
        raise InterruptedError

    def build() -> None:
        device = torch.device("cpu")
        if name.startswith("cogvideox"):  # refuses a full-size model on a CPU
            weights._built(weights.VARIANTS[name[-2:]], device, torch.bfloat16, None)
        step_models.build(name, device)

    monkeypatch.setattr(weights, "with_random_weights", on_meta)
    with pytest.raises(InterruptedError):
        build()
    assert counts == [pytest.approx(PARAMETERS[name], rel=0.02)]


@pytest.mark.parametrize("name", CALLS)
def test_every_attention_call_of_a_step_is_counted(step_times: ModuleType, name: str) -> None:
    asked = asked_for("sage", "auto")
    facts = step_times.measured(name, asked)
    unpatched, sage, auto = facts["rows"]
    assert [row["attention_calls"] for row in facts["rows"]] == [CALLS[name]] * 3
    assert [row["kernel_calls"] for row in facts["rows"]] == [0, CALLS[name], 0]
    assert unpatched["time"]["median_ms"] > 0
    assert sage["time"] is None, "an emulation is no speed"
    assert auto["ratio"] > 0
    assert "sage " not in "".join(step_times.lines_of(facts))


def test_report_77_compiled_steps_are_compared_with_the_compiled_one(
    step_times: ModuleType,
) -> None:
    asked = asked_for("auto", budget=0.5, compiled=True)
    rows = {row["name"]: row for row in step_times.measured("wan-1.3b", asked)["rows"]}
    assert list(rows) == ["unpatched", "unpatched, compiled", "auto", "auto, compiled"]
    assert rows["unpatched, compiled"]["ratio"] is None
    pair = [rows[name]["time"]["median_ms"] for name in ("unpatched, compiled", "auto, compiled")]
    assert rows["auto, compiled"]["ratio"] == pytest.approx(pair[0] / pair[1], rel=0.5)


def test_a_model_that_fails_costs_its_own_row_alone(
    step_times: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measured(name: str, args: argparse.Namespace) -> dict[str, object]:
        if name == "wan-1.3b":
            raise RuntimeError("out of memory")
        return {"model": name}

    monkeypatch.setattr(step_times, "measured", measured)
    output = tmp_path / "times.json"
    asked = ["--output", str(output), "--models", "wan-1.3b,flux-dev-1024", "--tiny"]
    assert step_times.main(asked) == 1
    report = json.loads(output.read_text())
    assert report["models"] == [{"model": "flux-dev-1024"}]
    assert report["failed"] == ["wan-1.3b: RuntimeError: out of memory"]


def test_the_full_size_is_that_of_cogvideox(step_models: ModuleType) -> None:
    from diffusers import CogVideoXTransformer3DModel

    weights, sizes = step_models.random_weights, {}
    for name, config in weights.VARIANTS.items():
        with torch.device("meta"):
            model = CogVideoXTransformer3DModel(**config)
        sizes[name] = sum(parameter.numel() for parameter in model.parameters())
        frames = (config["sample_frames"] - 1) // 4 + 1
        assert config["max_text_seq_length"] + frames * 30 * 45 == 17_776
    assert sizes["2b"] == pytest.approx(1.7e9, rel=0.03)
    assert sizes["5b"] == pytest.approx(5.6e9, rel=0.03)


def test_a_sharing_copy_is_patched_alone(step_times: ModuleType, step_models: ModuleType) -> None:
    import sage_plugin

    step = step_models.random_weights.build(
        "2b", torch.device("cpu"), torch.float32, tiny=True, seed=0
    )
    twin = step_times.step_timing.sharing_copy(step.model)
    pairs = zip(step.model.parameters(), twin.parameters(), strict=True)
    assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
    with torch.no_grad():
        before = step.model(**step.arguments)[0]
        with sage_plugin.patched(twin, kernel="sage", min_seq=0):
            ours = twin(**step.arguments)[0]
            assert torch.equal(step.model(**step.arguments)[0], before)
    assert not torch.equal(ours, before)
    assert torch.isfinite(ours).all()


def test_linears_beside_attention_are_counted_and_of_fewer_blocks(step_times: ModuleType) -> None:
    asked = asked_for("sdpa+int8_row", layers=1)
    unpatched, linears = step_times.measured("wan-1.3b", asked)["rows"]
    assert unpatched["linear_calls"] == {}
    assert linears["linear_calls"] == {"int8_row:emulation": 9, "int8_row:emulation+gelu_tanh": 1}
    assert linears["attention_calls"] == 2, "self and cross attention of one block"
    assert linears["time"] is None
    with pytest.raises(argparse.ArgumentTypeError, match="no kernel of linears"):
        step_times.kernels_and_linears("auto,auto+int9")


def test_peers_are_timed_in_their_turn(
    step_times: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, torchs = [], torch.nn.functional.scaled_dot_product_attention

    def flash_attn_func(q, k, v, *, softmax_scale, causal):
        shapes.append(tuple(q.shape))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torchs(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)

    fa3 = ModuleType("fa3_fwd_interface")
    fa3.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", fa3)
    asked = asked_for("fa3", "sdpa", layers=1)
    _, ours, sdpa = step_times.measured("wan-1.3b", asked)["rows"]
    assert set(shapes) == {(1, 48, 2, 32)}, "self and cross attention, with heads behind tokens"
    assert len(shapes) % 2 == 0
    assert torch.nn.functional.scaled_dot_product_attention is torchs
    assert ours["ratio"] > 0
    assert ours["attention_calls"] == 0, "no call of ours"
    assert sdpa["attention_calls"] == 2
    assert step_times.kernels_and_linears("auto,torchao+fa3") == ["auto", "torchao+fa3"]


def test_kernels_are_timed_with_configs_of_a_folder_too(
    step_times: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sage_plugin

    asked_of, stock = [], sage_plugin.patch

    def patch(target, **options):
        asked_of.append((options["kernel"], options["config_dir"]))
        return stock(target, **options)

    monkeypatch.setattr(sage_plugin, "patch", patch)
    asked = asked_for("sdpa", layers=1, config_dir=str(tmp_path))
    rows = step_times.measured("wan-1.3b", asked)["rows"]
    assert [row["name"] for row in rows] == ["unpatched", "sdpa", "sdpa, tuned"]
    assert asked_of == [("sdpa", None), ("sdpa", None), ("sdpa", str(tmp_path))]
