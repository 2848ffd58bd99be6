"""The launch config of our product: given, of the environment, tuned, or the default."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from sage_plugin import device, settings
from sage_plugin.errors import ConfigError, UnsupportedInputError
from sage_plugin.kernels import launch_config
from sage_plugin.kernels.linear import torch_ops
from sage_plugin.kernels.linear.call import LinearCall
from sage_plugin.kernels.linear.executor import resolve
from sage_plugin.kernels.linear.launch_space import (
    RULES,
    default_launch,
    find_launch,
    search_space,
    tune_command,
)
from sage_plugin.kernels.resolver import BackendRequest
from sage_plugin.registry import load
from sage_plugin.registry.merge import merge
from sage_plugin.schema import LinearKey, LinearLaunch
from tests.registry.samples import FACTS, TOOLCHAIN, linear_entry

pytest.importorskip("triton")

CPU = device.facts("cpu")
KEY = LinearKey("int8_row", "triton", 64, 96, "float32", 40)
TUNED = LinearLaunch(block_m=32, block_n=64, block_k=64, num_warps=2, num_stages=2)
GIVEN = TUNED.replaced(num_warps=1)
CALL = LinearCall(torch.randn(40, 64), torch.randn(96, 64))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("CONFIG_DIR", "LAUNCH", "LINEAR_LAUNCH"):
        monkeypatch.delenv(f"SAGE_PLUGIN_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(settings, "triton_interpreted", lambda: True)
    launch_config.forget()
    yield
    launch_config.forget()


def tune(folder: Path, config: LinearLaunch = TUNED) -> None:
    path = load.file_path(folder, CPU.slug, "linear")
    merge(path, [linear_entry(KEY, config)], family="linear", facts=CPU, toolchain=TOOLCHAIN)


def launch_of(call: LinearCall = CALL, launch: LinearLaunch | None = None) -> LinearLaunch:
    return resolve(call, BackendRequest("int8_row", "triton", launch)).backend.launch


def test_each_place_goes_before_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert launch_of() == default_launch(KEY, CPU) != TUNED
    tune(tmp_path / "user" / "sage_plugin", TUNED.replaced(num_stages=1))
    launch_config.forget()
    assert launch_of() == TUNED.replaced(num_stages=1)
    tune(tmp_path / "mine")
    monkeypatch.setenv("SAGE_PLUGIN_CONFIG_DIR", str(tmp_path / "mine"))
    assert launch_of() == TUNED
    monkeypatch.setenv("SAGE_PLUGIN_LINEAR_LAUNCH", '{"block_n": 32}')
    assert launch_of() == TUNED.replaced(block_n=32)
    assert launch_of(launch=GIVEN) == GIVEN


def test_a_tuned_config_serves_rows_nearby_and_no_other_features(tmp_path, monkeypatch) -> None:
    tune(tmp_path)
    monkeypatch.setenv("SAGE_PLUGIN_CONFIG_DIR", str(tmp_path))
    assert launch_of(CALL._replace(x=torch.randn(4, 20, 64))) == TUNED
    assert launch_of(CALL._replace(x=torch.randn(81, 64))) != TUNED
    assert launch_of(CALL._replace(weight=torch.randn(32, 64))) != TUNED


def test_graphs_multiply_with_the_same_config(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch_ops.device, "facts_of", lambda *_: CPU)
    where = torch.device("meta")
    assert torch_ops._products_of(where, KEY, None).launch == default_launch(KEY, CPU)
    tune(tmp_path)
    assert torch_ops._products_of(where, KEY, str(tmp_path)).launch == TUNED
    monkeypatch.setenv("SAGE_PLUGIN_CONFIG_DIR", str(tmp_path))
    assert torch_ops._products_of(where, KEY, None).launch == TUNED


def test_an_illegal_config_is_passed_over_or_refused(tmp_path, monkeypatch) -> None:
    tune(tmp_path, TUNED.replaced(block_k=48))
    monkeypatch.setenv("SAGE_PLUGIN_CONFIG_DIR", str(tmp_path))
    assert launch_of() == default_launch(KEY, CPU)
    with pytest.raises(UnsupportedInputError, match="block_k 48"):
        launch_of(launch=TUNED.replaced(block_k=48))
    with pytest.raises(UnsupportedInputError, match=r"launch is dict; give a sage_plugin\.schema"):
        launch_of(launch={"block_k": 64})
    wrong = {'{"block_k": 48}': "block_k 48", '{"pv_flush": 1}': "pv_flush", "1": "int"}
    for text, says in wrong.items():
        monkeypatch.setenv("SAGE_PLUGIN_LINEAR_LAUNCH", text)
        with pytest.raises(ConfigError, match=f"SAGE_PLUGIN_LINEAR_LAUNCH.*{says}"):
            launch_of()


def test_attentions_variable_changes_no_linear(monkeypatch) -> None:
    monkeypatch.setenv("SAGE_PLUGIN_LAUNCH", '{"block_m": 16, "pv_flush": 1}')
    assert launch_of() == default_launch(KEY, CPU)


def test_a_miss_on_a_gpu_names_its_command(caplog) -> None:
    found = launch_config.find(KEY, FACTS, RULES)
    assert found.source == "default"
    assert tune_command(KEY) == (
        "sage tune --op linear --kernel int8_row:triton --dtype float32 --out-in-features 96/64 "
        "--batch-sizes 40"
    )
    assert "96 x 64 features: using defaults; `sage capture --op linear" in caplog.text


def test_what_is_searched_begins_with_the_default_and_describes_no_odd_rows() -> None:
    for channels, loads in ((4096, "descriptor"), (4100, "pointer")):
        key = LinearKey("int8_row", "triton", channels, 4096, "bfloat16", 4096)
        space = search_space(key, FACTS)
        assert space[0] == default_launch(key, FACTS)
        assert {config.loads for config in space} == {loads}
        assert len(set(space)) == len(space) > 30


@pytest.mark.parametrize(("sources", "stale"), [("linear", False), ("attention", True)])
def test_a_config_goes_by_the_sources_of_its_own_op_family(tmp_path, sources, stale) -> None:
    entry = linear_entry(KEY, TUNED)
    by = dataclasses.replace(entry.evidence, toolchain=device.toolchain(sources))
    path = load.file_path(tmp_path, CPU.slug, "linear")
    own = dataclasses.replace(entry, evidence=by)
    merge(path, [own], family="linear", facts=CPU, toolchain=TOOLCHAIN)
    found = find_launch(KEY, CPU, config_dir=str(tmp_path))
    assert found.stale == (("the kernels were edited since",) if stale else ())
