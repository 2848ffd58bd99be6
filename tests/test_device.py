"""What a device is: slugs that do not collide, FP8 types by architecture, facts from properties."""

from __future__ import annotations

import re
import sys
import types

import pytest
import torch

from sage_plugin import __version__, device
from sage_plugin.errors import DeviceError

# What drivers call their devices (nvidia-smi, rocm-smi, torch), and the folder of its configs.
SLUGS = {
    "NVIDIA H100 80GB HBM3": "nvidia-h100-80gb-hbm3",
    "NVIDIA H100 PCIe": "nvidia-h100-pcie",
    "NVIDIA H100 NVL": "nvidia-h100-nvl",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": "nvidia-h100-80gb-hbm3-mig-1g-10gb",
    "NVIDIA H100 80GB HBM3 MIG 3g.40gb": "nvidia-h100-80gb-hbm3-mig-3g-40gb",
    "NVIDIA H200": "nvidia-h200",
    "NVIDIA H200 NVL": "nvidia-h200-nvl",
    "NVIDIA H20": "nvidia-h20",
    "NVIDIA H20-3e": "nvidia-h20-3e",
    "NVIDIA H800": "nvidia-h800",
    "NVIDIA GH200 480GB": "nvidia-gh200-480gb",
    "NVIDIA GH200 144G HBM3e": "nvidia-gh200-144g-hbm3e",
    "NVIDIA A100-SXM4-40GB": "nvidia-a100-sxm4-40gb",
    "NVIDIA A100-SXM4-80GB": "nvidia-a100-sxm4-80gb",
    "NVIDIA A100 80GB PCIe": "nvidia-a100-80gb-pcie",
    "NVIDIA A10": "nvidia-a10",
    "NVIDIA A10G": "nvidia-a10g",
    "NVIDIA L4": "nvidia-l4",
    "NVIDIA L40": "nvidia-l40",
    "NVIDIA L40S": "nvidia-l40s",
    "NVIDIA GeForce RTX 3090": "nvidia-geforce-rtx-3090",
    "NVIDIA GeForce RTX 3090 Ti": "nvidia-geforce-rtx-3090-ti",
    "NVIDIA GeForce RTX 4090": "nvidia-geforce-rtx-4090",
    "NVIDIA GeForce RTX 4090 D": "nvidia-geforce-rtx-4090-d",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "nvidia-geforce-rtx-4090-laptop-gpu",
    "NVIDIA GeForce RTX 5090": "nvidia-geforce-rtx-5090",
    "NVIDIA RTX 6000 Ada Generation": "nvidia-rtx-6000-ada-generation",
    "Quadro RTX 6000": "quadro-rtx-6000",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (
        "nvidia-rtx-pro-6000-blackwell-workstation-edition"
    ),
    "NVIDIA B200": "nvidia-b200",
    "NVIDIA GB200": "nvidia-gb200",
    "NVIDIA GB10": "nvidia-gb10",
    "Tesla V100-SXM2-16GB": "tesla-v100-sxm2-16gb",
    "Tesla T4": "tesla-t4",
    "AMD Instinct MI300X": "amd-instinct-mi300x",
    "AMD Instinct MI300X VF": "amd-instinct-mi300x-vf",
    "AMD Instinct MI308X": "amd-instinct-mi308x",
    "AMD Instinct MI325X": "amd-instinct-mi325x",
    "AMD Instinct MI355X": "amd-instinct-mi355x",
    "AMD Radeon RX 7900 XT": "amd-radeon-rx-7900-xt",
    "AMD Radeon RX 7900 XTX": "amd-radeon-rx-7900-xtx",
    "AMD Radeon(TM) 8060S Graphics": "amd-radeon-8060s-graphics",
}


@pytest.mark.parametrize(("name", "slug"), SLUGS.items())
def test_the_slug_of_a_driver_string(name, slug):
    assert device.slug(name) == slug


def test_no_two_devices_share_a_slug():
    assert len({device.slug(name) for name in SLUGS}) == len(SLUGS)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("", "unknown"),
        ("   ", "unknown"),
        ("!!", "unknown"),
        ("../../etc/passwd", "etc-passwd"),
        ("  NVIDIA  L4\n", "nvidia-l4"),
        ("Graphics (R) 620", "graphics-620"),
        ("Gerät 1", "ger-t-1"),
    ],
)
def test_a_slug_is_safe_as_a_folder_name_whatever_the_driver_says(name, slug):
    assert device.slug(name) == slug
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", device.slug(name))
    assert device.slug(device.slug(name)) == device.slug(name)


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("sm_75", None),
        ("sm_80", None),
        ("sm_86", None),
        ("sm_87", None),
        ("sm_89", "float8_e4m3fn"),
        ("sm_90", "float8_e4m3fn"),
        ("sm_100", "float8_e4m3fn"),
        ("sm_103", "float8_e4m3fn"),
        ("sm_120", "float8_e4m3fn"),
        ("sm_121", "float8_e4m3fn"),
        ("gfx90a", None),
        ("gfx942", "float8_e4m3fnuz"),
        ("gfx950", "float8_e4m3fn"),
        ("gfx1100", None),
        ("gfx1200", "float8_e4m3fn"),
        ("gfx1201", "float8_e4m3fn"),
        ("x86_64", None),
        ("", None),
    ],
)
def test_report_111_the_fp8_type_of_an_architecture(arch, expected):
    assert device.fp8_dtype(arch) == expected
    if expected:
        assert torch.finfo(getattr(torch, expected)).max == (240 if "942" in arch else 448)


def test_the_facts_of_a_cpu():
    found = device.facts("cpu")
    assert found.kind == "cpu"
    assert found.slug == device.slug(f"cpu-{found.arch}")
    assert found.sm_count >= 1
    assert (found.memory_bytes, found.smem_bytes) == (0, 0)
    assert found.fp8_dtype == "float8_e4m3fn"
    assert device.facts(torch.device("cpu")) is found
    assert device.facts("cpu:0") is found
    assert type(found).from_json(found.to_json()) == found


# -- GPUs that are not here -------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """Let torch report GPUs with given properties; returns how to name them."""

    def report(*properties: object, hip: str | None = None, current: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(properties))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(properties))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
        monkeypatch.setattr(torch.version, "hip", hip)

    device._gpu_facts.cache_clear()
    yield report
    device._gpu_facts.cache_clear()


def properties(name="NVIDIA H100 80GB HBM3", **changes):
    base = {
        "name": name,
        "major": 9,
        "minor": 0,
        "multi_processor_count": 132,
        "total_memory": 80 * 2**30,
        "shared_memory_per_block": 48 * 2**10,
        "shared_memory_per_block_optin": 227 * 2**10,
    }
    return types.SimpleNamespace(**(base | changes))


def test_the_facts_of_an_nvidia_gpu(gpus):
    gpus(properties())
    assert device.facts().to_json() == {
        "slug": "nvidia-h100-80gb-hbm3",
        "name": "NVIDIA H100 80GB HBM3",
        "kind": "cuda",
        "arch": "sm_90",
        "sm_count": 132,
        "memory_bytes": 80 * 2**30,
        "smem_bytes": 227 * 2**10,
        "fp8_dtype": "float8_e4m3fn",
    }


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((7, 5), "sm_75"), ((8, 9), "sm_89"), ((10, 0), "sm_100"), ((12, 1), "sm_121")],
)
def test_a_capability_becomes_an_architecture(gpus, capability, arch):
    gpus(properties(major=capability[0], minor=capability[1]))
    assert device.facts("cuda").arch == arch


def test_report_109_hip_is_told_by_torch_not_by_a_capability(gpus):
    amd = properties(
        "AMD Instinct MI300X",
        major=9,
        minor=4,
        gcnArchName="gfx942:sramecc+:xnack-",
        shared_memory_per_block=64 * 2**10,
        shared_memory_per_block_optin=0,
    )
    gpus(amd, hip="6.4")
    found = device.facts()
    assert (found.kind, found.arch, found.slug) == ("hip", "gfx942", "amd-instinct-mi300x")
    assert found.fp8_dtype == "float8_e4m3fnuz"
    assert found.smem_bytes == 64 * 2**10


def test_shared_memory_without_an_opt_in_property(gpus):
    old = properties()
    del old.shared_memory_per_block_optin
    gpus(old)
    assert device.facts().smem_bytes == 48 * 2**10


def test_each_gpu_has_its_own_facts_and_the_current_one_is_the_default(gpus):
    gpus(properties(), properties("NVIDIA L4", major=8, minor=9), current=1)
    assert device.facts().slug == "nvidia-l4"
    assert device.facts("cuda").slug == "nvidia-l4"
    assert device.facts("cuda:0").slug == "nvidia-h100-80gb-hbm3"
    assert device.facts(0).slug == "nvidia-h100-80gb-hbm3"
    assert device.facts(torch.device("cuda", 1)).arch == "sm_89"
    assert device.facts(1) is device.facts("cuda:1")
    assert device.facts("cpu").kind == "cpu"


def test_a_gpu_that_does_not_exist_is_an_error(gpus):
    gpus(properties())
    with pytest.raises(DeviceError, match="GPU 3 does not exist: there are 1"):
        device.facts("cuda:3")


def test_without_a_gpu_the_default_is_the_cpu_and_cuda_is_an_error(gpus):
    gpus()
    assert device.facts().kind == "cpu"
    for name in ("cuda", "cuda:0", 0):
        with pytest.raises(DeviceError, match="no GPU that torch can use") as error:
            device.facts(name)
        assert error.value.exit_code == 3


@pytest.mark.parametrize("name", ["mps", "meta", "xpu:0", "banana", "cuda:x", -1, ""])
def test_an_unknown_device_is_an_error_of_ours(name):
    with pytest.raises(DeviceError, match="only cpu and cuda"):
        device.facts(name)


# -- the toolchain ----------------------------------------------------------------------------


def test_the_toolchain_names_what_is_installed():
    found = device.toolchain()
    assert found.sage_plugin == __version__
    assert found.torch == torch.__version__
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.triton == device.triton_version()
    assert found is device.toolchain()
    assert len(found.kernels) == 16
    assert found.kernels != device.toolchain("linear").kernels


@pytest.mark.parametrize("error", [ImportError("no"), OSError("bad DLL"), RuntimeError("broken")])
def test_report_104_a_broken_triton_counts_as_none(monkeypatch, error):
    class Broken:
        """An import hook that fails as a broken install does."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "triton":
                raise error

    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
    device.triton_version.cache_clear()
    try:
        assert device.triton_version() == ""
    finally:
        device.triton_version.cache_clear()
