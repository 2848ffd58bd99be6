"""Files of effects, which anybody may have written."""

from __future__ import annotations

import json

import pytest

from sage_plugin.errors import ConfigError
from sage_plugin.tune.policy import sensitivity_file
from sage_plugin.tune.policy.sensitivity_file import Sensitivities, Sensitivity, read

SOUND = Sensitivities(
    1, "fav3_fp8", (Sensitivity("a.attn", ":50%", 0.25), Sensitivity("a.attn", "50%:", 0.0))
)


def test_a_file_is_read_back(tmp_path):
    path = tmp_path / "e.json"
    path.write_text(json.dumps(SOUND.to_json()))
    assert read(path) == SOUND


def changed(**fields):
    return json.dumps({**SOUND.to_json(), **fields})


def rmse(value):
    return changed(cells=[{"layer": "a", "steps": "", "rmse": value}])


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "null", "{}", "[" * 100_000, "\0", changed(cells=[]), changed(cells=3),
        changed(schema_version=2), changed(more=1), changed(kernel=None), rmse(-0.1),
        rmse(float("nan")), rmse(float("inf")), rmse(10**400), rmse("much"), rmse(True),
        changed(cells=[{"layer": "a", "rmse": 1.0}]),
    ],
)  # fmt: skip
def test_what_nobody_measured_is_refused_in_one_sentence(tmp_path, text):
    path = tmp_path / "e.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"e\.json") as caught:
        read(path)
    assert len(str(caught.value)) < 600


def test_missing_and_huge_files_are_refused(tmp_path, monkeypatch):
    for path in (tmp_path, tmp_path / "absent.json"):
        with pytest.raises(ConfigError, match=r"no such file|not a regular file"):
            read(path)
    path = tmp_path / "e.json"
    path.write_text(changed())
    monkeypatch.setattr(sensitivity_file, "MAX_BYTES", 50)
    with pytest.raises(ConfigError, match="larger than 50 bytes"):
        read(path)
