"""The launch config of a grouped product: tuned, by groups and nearby rows, or the default."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sage_plugin.kernels import launch_config
from sage_plugin.kernels.grouped_linear.launch_space import (
    default_launch,
    find_launch,
    illegal_reason,
    search_space,
    tune_command,
)
from sage_plugin.registry import load
from sage_plugin.registry.merge import merge
from sage_plugin.schema import LinearKey
from tests.kernels.devices import facts
from tests.registry.samples import TOOLCHAIN, linear_entry

H200 = facts("sm_90")
KEY = LinearKey("fp8_row", "triton", 2048, 1536, "bfloat16", 4096, 128)


def of(**changes) -> LinearKey:
    return dataclasses.replace(KEY, **changes)


def test_the_nearest_rows_of_the_same_groups_are_found(tmp_path: Path) -> None:
    few, many = (default_launch(KEY, H200).replaced(group_m=g) for g in (1, 2))
    path = load.file_path(tmp_path, H200.slug, "grouped_linear")
    merge(
        path, [linear_entry(of(rows=1000), few), linear_entry(KEY, many)],
        family="grouped_linear", facts=H200, toolchain=TOOLCHAIN,
    )  # fmt: skip
    launch_config.forget()
    found = {
        (rows, groups): find_launch(of(rows=rows, groups=groups), H200, config_dir=str(tmp_path))
        for rows, groups in ((4096, 128), (1500, 128), (2050, 128), (8192, 128), (4096, 64))
    }
    # 2,050 is nearer to 4,096 than to 1,000 in log space, and not in numbers
    configs = {at: one.config.group_m for at, one in found.items()}
    default = default_launch(of(groups=64), H200).group_m
    assert configs == {
        (4096, 128): 2, (1500, 128): 1, (2050, 128): 2, (8192, 128): 2, (4096, 64): default,
    }  # fmt: skip
    launch_config.forget()


@pytest.mark.parametrize("kernel", ["bf16", "fp8_row", "int8_row"])
@pytest.mark.parametrize("rows", [16, 4096, 1 << 20])
def test_defaults_are_legal_and_16_bit_numbers_go_in_half_steps(kernel: str, rows: int) -> None:
    key = of(kernel=kernel, rows=rows)
    default = default_launch(key, H200)
    assert illegal_reason(default, key, H200) is None
    assert search_space(key, H200)[0] == default
    legal = [one for one in search_space(key, H200) if illegal_reason(one, key, H200) is None]
    assert len(legal) > 5
    if kernel == "bf16":
        of_bytes = search_space(of(rows=rows), H200)
        assert {2 * c.block_k for c in search_space(key, H200)} == {c.block_k for c in of_bytes}


def test_the_command_that_fills_a_miss() -> None:
    assert tune_command(KEY) == (
        "sage tune --op grouped_linear --kernel fp8_row:triton --dtype bfloat16 "
        "--out-in-features 1536/2048 --groups 128 --batch-sizes 4096"
    )
