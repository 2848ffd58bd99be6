"""The reader of CTranslate2 files: what it reads, and that nothing else gets through."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.real.ctranslate2 import DamagedModelError, read_tensors

FP16, INT16, UNKNOWN = 4, 2, 9


def name(text):
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def variable(text, dims, code, data, size=None):
    shape = struct.pack(f"<B{len(dims)}I", len(dims), *dims)
    return name(text) + shape + struct.pack("<BI", code, len(data) if size is None else size) + data


HALVES = torch.tensor([[1.0, -2.0, 0.5], [0.0, 4.0, 8.0]], dtype=torch.float16)
WEIGHT = variable("encoder/w", (2, 3), FP16, HALVES.numpy().tobytes())
HEADS = variable("encoder/heads", (), INT16, struct.pack("<h", 6))
OTHER = variable("decoder/w", (2, 3), FP16, HALVES.numpy().tobytes())


def model(*variables, version=6, kind="WhisperSpec", count=None):
    head = struct.pack("<I", version) + name(kind)
    count = len(variables) if count is None else count
    return head + struct.pack("<II", 3, count) + b"".join(variables) + struct.pack("<I", 0)


def read(tmp_path, data):
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    return read_tensors(path, kind="WhisperSpec", prefix="encoder/")


def test_reads_names_dims_types_and_values(tmp_path):
    found = read(tmp_path, model(OTHER, WEIGHT, HEADS))
    assert list(found) == ["encoder/w", "encoder/heads"]
    assert torch.equal(found["encoder/w"], HALVES)
    assert found["encoder/w"].dtype == torch.float16
    assert found["encoder/heads"].shape == ()
    assert found["encoder/heads"].item() == 6


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (model(WEIGHT, version=5), "version 5"),
        (model(WEIGHT, kind="TransformerSpec"), "'TransformerSpec', not a 'WhisperSpec'"),
        (model(WEIGHT, count=2**31), "announces 2147483648"),
        (model(WEIGHT, count=2)[:-4], "missing at byte"),
        (model(WEIGHT, WEIGHT), "encoder/w is there twice"),
        (model(variable("w", (2, 3), UNKNOWN, bytes(12))), "unknown type 9"),
        (model(variable("w", (2, 4), FP16, bytes(12))), "do not fill"),
        (model(variable("w", (2**32 - 1,) * 8, FP16, bytes(12))), "do not fill"),
        (model(variable("w", (0, 2**32 - 1), FP16, b"")), "do not fill"),
        (model(variable("w", (2**30,), FP16, bytes(12), size=2**31)), "missing at byte"),
        (model(variable("w", (1,) * 9, FP16, bytes(2))), "9 dimensions"),
        (model(WEIGHT.replace(b"encoder/w\0", b"encoder/ww")), "no name"),
        (b"", "missing at byte 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hostile_file_is_refused_by_name(tmp_path, data, sentence):
    with pytest.raises(DamagedModelError, match=sentence):
        read(tmp_path, data)


def test_no_prefix_of_a_file_is_taken_for_the_whole(tmp_path):
    whole = model(WEIGHT, HEADS)
    for length in range(len(whole) - 4):  # the last number counts aliases, which are not read
        with pytest.raises(DamagedModelError):
            read(tmp_path, whole[:length])


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.integers(0, len(model(WEIGHT, HEADS)) - 1), st.integers(0, 255))
def test_a_changed_byte_gives_tensors_or_one_error(tmp_path, place, value):
    data = bytearray(model(WEIGHT, HEADS))
    data[place] = value
    try:
        found = read(tmp_path, bytes(data))
    except DamagedModelError:
        return
    assert all(isinstance(tensor, torch.Tensor) for tensor in found.values())
