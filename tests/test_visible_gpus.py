"""`visible_gpus.py`: which GPU a worker of the tests has first."""

from __future__ import annotations

import pytest

from tests.visible_gpus import rotation


@pytest.mark.parametrize(
    ("worker", "visible", "expected"),
    [
        ("gw0", "0,1,2", "0,1,2"),
        ("gw1", "0,1,2", "1,2,0"),
        ("gw5", "0,1,2", "2,0,1"),
        ("gw3", "GPU-a,GPU-b", "GPU-b,GPU-a"),
        ("gw7", "4", "4"),
        ("gw7", "", ""),
        ("", "0,1", "0,1"),
        ("master", "0,1", "0,1"),
    ],
)
def test_each_worker_begins_at_another_gpu_and_sees_all(worker, visible, expected):
    assert rotation(worker, visible) == expected
