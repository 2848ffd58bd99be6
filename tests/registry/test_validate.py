"""`sage configs check` finds what the runtime would silently miss."""

from __future__ import annotations

import dataclasses

import pytest

from sage_plugin.errors import ConfigError
from sage_plugin.registry import load, store
from sage_plugin.registry.validate import problems, registry_files
from tests.registry import samples
from tests.registry.samples import FACTS


@pytest.fixture
def path_of(put):
    def write(*entries, facts=FACTS):
        return load.file_path(put(samples.file(*entries, facts=facts)), facts.slug)

    return write


def test_a_sound_file_has_no_problem(path_of):
    path = path_of(samples.entry())
    assert problems(path) == problems(path, FACTS) == []
    assert problems(path, FACTS, illegal=lambda *_: None) == []


def test_wrong_device_facts_make_entries_unreachable(path_of):
    path = path_of(samples.entry(), facts=dataclasses.replace(FACTS, sm_count=80))
    (sentence,) = problems(path, FACTS)
    assert "1 entry unreachable: sm_count is 80 there, 132 on this device" in sentence
    assert problems(path) == [], "without a device at hand there is nothing to compare with"


def test_a_slug_that_no_device_asks_for(path_of):
    facts = dataclasses.replace(FACTS, slug="h100")
    (sentence,) = problems(path_of(samples.entry(), facts=facts))
    assert "looks for 'nvidia-h100-80gb-hbm3', the file says 'h100'" in sentence


def test_a_file_in_another_folder_or_of_another_name(path_of, tmp_path):
    path = path_of(samples.entry())
    moved = tmp_path / "elsewhere" / "matmul.json"
    moved.parent.mkdir()
    moved.write_text(path.read_text())
    text = " ".join(problems(moved))
    assert "the folder is 'elsewhere'" in text
    assert "holds 'attention', expected 'matmul'" in text


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (samples.entry(samples.key(kernel="fav9")), "unknown kernel 'fav9'"),
        (samples.entry(samples.key(variant="blackwell")), "unknown variant 'blackwell'"),
        (samples.entry(because=samples.evidence(inputs=())), "names no inputs"),
        (samples.entry(because=samples.evidence(-0.1)), "no gain"),
        (
            samples.entry(
                because=samples.evidence(errors=dataclasses.replace(samples.ERRORS, bad_values=3))
            ),
            "3 NaN or infinite",
        ),
    ],
)
def test_unsound_entries_are_named(path_of, entry, says):
    (sentence,) = problems(path_of(entry))
    assert says in sentence
    assert "entry 1" in sentence


def test_legality_is_asked_with_the_files_own_device(path_of):
    asked = []

    def illegal(config, key, facts):
        asked.append((config, key, facts))
        return "needs 300 KiB of shared memory, the device has 227"

    (sentence,) = problems(path_of(samples.entry()), illegal=illegal)
    assert "needs 300 KiB" in sentence
    assert asked == [(samples.CONFIG, samples.KEY, FACTS)]


def test_a_damaged_file_is_an_error_here(tmp_path):
    path = tmp_path / "attention.json"
    path.write_text('{"schema_version": NaN}')
    (sentence,) = problems(path)
    assert "NaN" in sentence


def test_files_of_a_folder(path_of, tmp_path):
    path = path_of(samples.entry())
    assert registry_files(path) == [path]
    assert registry_files(path.parents[1]) == [path]
    with pytest.raises(ConfigError, match="no such"):
        registry_files(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="inside"):
        registry_files(tmp_path / "empty")


def test_all_shipped_files_are_sound():
    shipped = load.shipped_dir()
    if shipped is None or not list(shipped.glob("*/*.json")):
        pytest.skip("nothing is shipped yet")
    for path in registry_files(shipped):
        assert problems(path) == []
        assert store.text_of(load.read(path)) == path.read_text(), "hand-edited: write it by merge"
        assert path.stat().st_size < 128 * 1024
