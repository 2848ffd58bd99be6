"""The stamp of a table, and NVML that answers, refuses or is missing."""

from __future__ import annotations

import types

import pytest

from sage_plugin.measure import clocks
from sage_plugin.measure.clocks import ClockSnapshot, snapshot, stamp

COOL = ClockSnapshot(1980, 2619, 40, 600.0, 700.0, ("power cap",))
HOT = ClockSnapshot(1200, 2619, 90, 600.0, 700.0, ("thermal (hardware)",))


@pytest.mark.parametrize(
    ("ratio", "before", "after", "expected"),
    [
        (1.0, None, None, "clean"),
        (0.9901, COOL, COOL, "clean"),
        (1.011, COOL, COOL, "noisy"),
        (0.98, None, None, "noisy"),
        (None, COOL, COOL, "noisy"),
        (1.0, COOL, HOT, "throttled"),
        (1.5, HOT, None, "throttled"),
    ],
)
def test_stamp(ratio, before, after, expected):
    assert stamp(ratio, before, after) == expected


def test_no_snapshot_of_a_cpu():
    assert snapshot("cpu") is None


def refuse(*_):
    raise RuntimeError("NotSupported")


def fake_nvml(**answers):
    names = (
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetTemperature",
    )
    calls = {name: answers.get(name, refuse) for name in names}
    constants = {"NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2, "NVML_TEMPERATURE_GPU": 0}
    return types.SimpleNamespace(**calls, **constants)


def test_a_card_that_answers():
    nvml = fake_nvml(
        nvmlDeviceGetCurrentClocksEventReasons=lambda handle: 0x04 | 0x40,
        nvmlDeviceGetPowerUsage=lambda handle: 512_000,
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
        nvmlDeviceGetClockInfo=lambda handle, which: 1000 * which,
        nvmlDeviceGetTemperature=lambda handle, which: 55,
    )
    state = clocks._read(nvml, object())
    assert state == ClockSnapshot(1000, 2000, 55, 512.0, 700.0, ("thermal (hardware)", "power cap"))
    assert state.throttled


def test_a_card_that_refuses_everything():
    state = clocks._read(fake_nvml(), object())
    assert state == ClockSnapshot(None, None, None, None, None, ())
    assert not state.throttled


def test_an_older_driver_is_asked_by_its_own_name():
    nvml = fake_nvml(nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x20)
    assert clocks._read(nvml, object()).reasons == ("thermal (software)",)


def test_a_card_is_found_by_its_uuid():
    nvml = types.SimpleNamespace(nvmlDeviceGetHandleByUUID=lambda text: text)
    assert clocks._handle(nvml, types.SimpleNamespace(uuid="12-34")) == "GPU-12-34"
    assert clocks._handle(nvml, types.SimpleNamespace(uuid="MIG-5")) == "MIG-5"
    assert clocks._handle(nvml, types.SimpleNamespace()) is None


@pytest.mark.gpu
def test_snapshot_of_a_gpu():
    pytest.importorskip("pynvml")
    state = snapshot("cuda")
    assert state is not None
    assert state.sm_mhz > 100
