"""A plan names studies that can run, and says why the others cannot."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sage_plugin import device
from sage_plugin.errors import CaptureError, DeviceError, UnknownKernelError, UsageError
from sage_plugin.kernels.attention import dispatch
from sage_plugin.replay.inputs import ReplayInputs
from sage_plugin.tune.configs import plan as plans
from sage_plugin.tune.configs import space_file
from sage_plugin.tune.configs.inputs import from_captures, from_drawn
from sage_plugin.tune.configs.plan import TuningRequest, build
from sage_plugin.tune.search.search import SearchLimits
from tests.registry import samples
from tests.tune import captures
from tests.tune.captures import DENSE, GROUPED, MASKED, SELF, WIDE


def request(*shapes, **changes) -> TuningRequest:
    return TuningRequest(
        from_drawn(map(ReplayInputs, shapes or (SELF,))), **{"device": "cpu", **changes}
    )


def test_on_a_cpu_the_emulation_of_the_default_kernel_is_tuned(tmp_path):
    plan = build(request(config_dir=tmp_path))
    (study,) = plan.studies
    assert study.kernel == "fav3_sage:emulation"
    assert study.timer.method == "wall"
    assert study.space == dispatch.candidates(study.key, device.facts("cpu"))
    assert study.space[0] == dispatch.default_launch(study.key, device.facts("cpu"))
    assert plan.registry_path == tmp_path / device.facts("cpu").slug / "attention.json"


@pytest.mark.parametrize(
    ("arch", "fp8", "kernel"),
    [("sm_90", "float8_e4m3fn", "fav3_sage"), ("sm_80", None, "sage")],
)
def test_on_a_gpu_the_kernel_is_what_the_chip_gets(monkeypatch, arch, fp8, kernel):
    facts = dataclasses.replace(samples.FACTS, arch=arch, fp8_dtype=fp8)
    monkeypatch.setattr(plans.devices, "facts", lambda _: facts)
    (study,) = build(request(device="cuda:0")).studies
    assert study.kernel == f"{kernel}:portable"
    assert study.timer.method == "events"
    assert study.device == "cuda:0"


def test_the_key_has_the_layout_and_the_full_size_of_the_record(tmp_path):
    folder = captures.write(tmp_path / "c", [(SELF, (0,)), (GROUPED, (0,))])
    plan = build(TuningRequest(from_captures(folder), device="cpu", kernels=("sage", "fav2")))
    keys = [study.key for study in plan.studies]
    assert [key.layout for key in keys] == ["bshd", "bshd", "bhsd", "bhsd"]
    assert [key.batch_heads for key in keys] == [4, 4, 4, 4]
    assert [key.gqa_ratio for key in keys] == [1, 1, 2, 2]
    assert [key.kernel for key in keys] == ["sage", "fav2"] * 2
    assert plan.calls == (captures.CALLS,) * 4


def test_kernel_names_and_variants(tmp_path):
    (one, two) = build(request(kernels=("qk_int8", "fav3_fp8:emulation"))).studies
    assert (one.kernel, two.kernel) == ("sage:emulation", "fav3_fp8:emulation")
    assert len(build(request(kernels=("sage", "qk_int8"))).studies) == 1
    with pytest.raises(UnknownKernelError):
        build(request(kernels=("flash9",)))
    with pytest.raises(UsageError, match="no launch config"):
        build(request(kernels=("sdpa",)))


def test_calls_that_go_to_the_hosts_attention_are_notes(tmp_path):
    folder = captures.write(tmp_path / "c", [(SELF, (0,)), (WIDE, (0,))])
    plan = build(TuningRequest(from_captures(folder), device="cpu"))
    assert len(plan.studies) == 1
    assert "head dim 264" in plan.notes[0]


def test_masked_calls_have_studies_of_their_own_and_are_named_by_their_mask(tmp_path):
    folder = captures.write(
        tmp_path / "c", [(SELF, (0,)), (MASKED, (0,)), (MASKED, (1,)), (DENSE, (1,))]
    )
    plan = build(TuningRequest(from_captures(folder), device="cpu"))
    assert plan.notes == ()
    kinds = {study.key.mask_kind: len(study.sources) for study in plan.studies}
    assert kinds == {"none": 1, "key_bias": 2, "dense": 1}
    assert len({study.id for study in plan.studies}) == 3
    wide = dataclasses.replace(WIDE, mask_kind="dense")
    with pytest.raises(CaptureError, match="264, 96 tokens, bf16 bshd dense: goes to the host's"):
        build(request(wide))


@pytest.mark.parametrize("kernel", ["sage:portable", "fav2:portable"])
def test_a_gpu_variant_on_a_cpu_is_refused_before_anything_runs(kernel, monkeypatch):
    with pytest.raises(UsageError, match=r"'portable' of kernel '(sage|fav2)' needs a GPU"):
        build(request(kernels=(kernel,)))
    monkeypatch.setenv("SAGE_PLUGIN_VARIANT", "portable")
    with pytest.raises(UsageError, match="needs a GPU"):
        build(request(kernels=("sage",)))


def test_a_cpu_with_a_number_is_a_cpu():
    (study,) = build(request(device="cpu:0")).studies
    assert (study.device, study.timer.method) == ("cpu", "wall")


def test_nothing_that_can_be_tuned_is_an_error_with_the_reasons(tmp_path):
    folder = captures.write(tmp_path / "c", [(WIDE, (0,))])
    with pytest.raises(CaptureError, match=r"nothing can be tuned: .*head dim 264") as caught:
        build(TuningRequest(from_captures(folder), device="cpu"))
    assert caught.value.exit_code == 2


def test_a_space_file_is_searched_instead_and_illegal_configs_are_counted(tmp_path):
    path = tmp_path / "space.json"
    path.write_text(json.dumps({"block_size_n": [64, 96, 128], "num_warps": [4, 3]}))
    plan = build(request(space=space_file.read(path)))
    (study,) = plan.studies
    assert study.default == dispatch.default_launch(study.key, study.facts)
    assert {config.block_n for config in study.space} == {64, 128}
    assert [note.removeprefix(f"{path}: ") for note in plan.notes] == [
        "2 configs cannot run here: num_warps 3 is not 1, 2, 4, 8 or 16",
        "2 configs cannot run here: block_n 96 is not a power of two between 32 and 256",
    ]


def test_the_same_request_gets_the_same_name_and_studies():
    one, two = build(request(SELF)), build(request(SELF))
    assert one.run_folder == two.run_folder
    assert one.run_folder.parent == Path("tuning_runs")
    assert one.run_folder.name.startswith(device.facts("cpu").slug)
    assert [s.id for s in one.studies] == [s.id for s in two.studies]
    assert build(request(GROUPED)).run_folder != one.run_folder
    assert build(request(SELF, run_name="mine")).run_folder.name == "mine"


def test_a_study_is_another_one_when_anything_changes_that_a_result_depends_on():
    (study,) = build(request(SELF)).studies
    changes = [
        {"key": dataclasses.replace(study.key, causal=True)},
        {"sources": tuple(dataclasses.replace(s, seed=9) for s in study.sources)},
        {"space": study.space[:1]},
        {"gate": dataclasses.replace(study.gate, min_cosine=0.5)},
        {"timer": dataclasses.replace(study.timer, method="graph")},
        {"facts": dataclasses.replace(study.facts, sm_count=999)},
        {"toolchain": dataclasses.replace(study.toolchain, triton="9.9.9")},
    ]
    ids = {dataclasses.replace(study, **change).id for change in changes}
    assert len(ids | {study.id}) == len(changes) + 1


@pytest.mark.parametrize(
    "changes",
    [
        {"timeout_s": 0},
        {"timeout_s": float("inf")},
        {"timeout_s": 1e30},
        {"timeout_s": float("nan")},
        {"limits": SearchLimits(budget_s=0.0)},
        {"limits": SearchLimits(max_trials=0)},
        {"limits": SearchLimits(patience=0)},
        {"min_gain": -0.1},
        {"min_gain": 1.0},
        {"run_name": "../elsewhere"},
        {"run_name": ".hidden"},
        {"device": "abacus"},
    ],
    ids=str,
)
def test_bad_numbers_and_names_are_usage_errors(changes):
    with pytest.raises(UsageError):
        build(request(**changes))


def test_a_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(DeviceError):
        build(request(device="cuda"))


def test_by_default_the_users_folder_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    plan = build(request())
    assert plan.registry_path.parents[1] == tmp_path / "sage_plugin"
