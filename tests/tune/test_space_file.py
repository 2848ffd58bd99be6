"""A space file says what it means, or which key is wrong."""

from __future__ import annotations

import json

import pytest

from sage_plugin.errors import ConfigError
from sage_plugin.tune.configs import space_file
from tests.registry import samples


@pytest.fixture
def write(tmp_path):
    def put(content: object):
        path = tmp_path / "space.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return put


def test_the_older_keys_are_understood_and_stage_is_ignored_aloud(write):
    content = {
        "block_size_m": [64, 128, 256],
        "block_size_n": [16, 32, 64, 128],
        "num_warps": [1, 2, 4, 8],
        "num_stages": [1, 2, 3, 4],
        "waves_per_eu": [0, 1, 2, 4],
        "stage": [1, 2, 3],
    }
    space = space_file.read(write(content))
    configs = space.configs(samples.CONFIG)
    assert len(configs) == 3 * 4 * 4 * 4 * 4, "the default is one of them"
    assert configs[0] == samples.CONFIG
    assert len(set(configs)) == len(configs)
    (note,) = space.notes
    assert note.endswith("'stage' is ignored: no kernel reads it")


def test_our_own_fields_of_every_type(write):
    content = {"pv_flush": [0, 1], "smooth_v": [True], "loads": ["pointer", "descriptor"]}
    configs = space_file.read(write(content)).configs(samples.CONFIG)
    assert len(configs) == 5, "the default, which is not in the product, and four"
    assert all(c.block_m == samples.CONFIG.block_m for c in configs)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object of lists"),
        ({}, "expected an object of lists"),
        ({"block_k": [64]}, "unknown field 'block_k'; allowed: block_m"),
        ({"block_m": 64}, "expected a list"),
        ({"block_m": []}, "at least one value"),
        ({"block_m": ["64"]}, "holds '64', expected int"),
        ({"block_m": [True]}, "holds True, expected int"),
        ({"smooth_k": [1]}, "holds 1, expected bool"),
        ({"block_m": [64], "block_size_m": [64]}, "a second time"),
        ('{"block_m": [64], "block_m": [128]}', "twice"),
        ({n: list(range(1, 100)) for n in ("block_m", "block_n", "num_warps")}, "970299 combin"),
        ("[" * 100_000, "too deeply"),
    ],
)
def test_what_is_wrong_is_named(write, content, says):
    with pytest.raises(ConfigError, match=says) as caught:
        space_file.read(write(content))
    assert "space.json" in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        space_file.read(tmp_path / "absent.json")
