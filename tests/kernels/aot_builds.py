"""Compile what a call would launch, for a GPU that is not here.

The launch code runs on CPU tensors with its kernels replaced by recorders; each recorded launch is
then compiled ahead of time from the very arguments that it was given. Run as a program, because
Triton decides at decoration whether it interprets:

    TRITON_INTERPRET=0 python -m tests.kernels.aot_builds '[{"kernel": "sage", ...}]'

prints one line of JSON for each launch of each call.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sage_plugin import device
from sage_plugin.kernels import dispatch, launches
from sage_plugin.kernels.attention import ops
from sage_plugin.kernels.contract import Decision, Problem
from sage_plugin.schema import CallKey, DeviceFacts, LaunchConfig

SMEM_KIB = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
    "gfx942": 64,
    "gfx950": 160,
    "gfx1100": 64,
    "gfx1201": 64,
}
TRITON_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
}


@dataclass(frozen=True)
class Call:
    """One attention call on one architecture; lengths do not matter to what is compiled."""

    kernel: str
    arch: str
    dim: int
    dtype: str = "bfloat16"
    causal: bool = False
    return_lse: bool = False
    launch: dict[str, Any] = field(default_factory=dict)

    def facts(self) -> DeviceFacts:
        """The device, with the shared memory that one program may use there."""
        return DeviceFacts(
            slug=self.arch,
            name=f"Test {self.arch}",
            kind="cuda" if self.arch.startswith("sm_") else "hip",
            arch=self.arch,
            sm_count=100,
            memory_bytes=2**34,
            smem_bytes=SMEM_KIB[self.arch] * 2**10,
            fp8_dtype=device.fp8_dtype(self.arch),
        )

    def tensors(self) -> list[torch.Tensor]:
        """Q, K and V of a small call in the shapes of a grouped one."""
        dtype = getattr(torch, self.dtype)
        return [torch.zeros(1, heads, 512, self.dim, dtype=dtype) for heads in (4, 2, 2)]

    def key(self) -> CallKey:
        """The call key."""
        q, k, v = self.tensors()
        shape = ops.shape_of(q, k, v, causal=self.causal, scale=0.125, layout="bhsd")
        return dispatch.call_key(shape, Decision(self.kernel, "portable"))

    def config(self) -> LaunchConfig:
        """The architecture's default, with the call's own changes."""
        return dispatch.default_launch(self.key(), self.facts()).replaced(**self.launch)


@dataclass
class Launch:
    """A recorded launch."""

    function: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


class Recorder:
    """Stands for a jitted kernel and keeps what it would be launched with."""

    def __init__(self, function: Any, kept: list[Launch]) -> None:
        self.function, self.kept = function, kept

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*positional: Any, **named: Any) -> None:
            names = self.function.arg_names
            arguments = dict(zip(names, positional, strict=False))
            arguments |= {n: v for n, v in named.items() if n in names}
            options = {n: v for n, v in named.items() if n not in names}
            self.kept.append(Launch(self.function, arguments, options))

        return run


def launches_of(call: Call) -> list[Launch]:
    """What the portable variant launches for a call: quantisation, then attention."""
    from sage_plugin.kernels.attention import portable as attention
    from sage_plugin.kernels.attention.implementations import implementation
    from sage_plugin.kernels.quant import portable as quant

    kept: list[Launch] = []
    stock = [
        (module, name, value)
        for module in (attention, quant)
        for name, value in vars(module).items()
        if name.endswith("_kernel")
    ]
    for module, name, value in stock:
        setattr(module, name, Recorder(value, kept))
    try:
        fp8 = getattr(torch, call.facts().fp8_dtype or "float8_e4m3fn")
        built = implementation(call.kernel, "portable", fp8)
        problem = Problem(0.125, call.causal, "bhsd")
        operands = built.prepare(*call.tensors(), problem=problem, launch=call.config())
        built.launch(operands, return_lse=call.return_lse)
    finally:
        for module, name, value in stock:
            setattr(module, name, value)
    return kept


def compile_launch(launch: Launch, arch: str) -> Any:
    """Compile a recorded launch with the specialisation that Triton's launcher would choose."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.function.params):
        value, at = launch.arguments[parameter.name], (index,)
        kind, aligned = _type_of(value)
        number = type(value) is int
        specialised = not (number and parameter.do_not_specialize)
        if parameter.is_constexpr or (number and specialised and value == 1):
            kind, constants[at] = "constexpr", value
        elif aligned and specialised:
            attributes[at] = [["tt.divisibility", 16]]
        signature[parameter.name] = kind
    source = ASTSource(launch.function, signature, constants, attributes)
    if arch.startswith("sm_"):
        target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    else:
        target = GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    return triton.compile(source, target=target, options=launch.options)


def _type_of(value: Any) -> tuple[str, bool]:
    """Triton's name of an argument's type, and whether the launcher sees that it is aligned."""
    if isinstance(value, torch.Tensor):
        return f"*{TRITON_TYPES[value.dtype]}", value.data_ptr() % 16 == 0
    if hasattr(value, "block_shape"):
        return f"tensordesc<{TRITON_TYPES[value.base.dtype]}{list(value.block_shape)}>", False
    if isinstance(value, float):
        return "fp32", False
    return "i32", isinstance(value, int) and value % 16 == 0


def resources(ptx: str) -> dict[str, int]:
    """Registers a thread and bytes of spills, as the assembler of Triton's own toolchain tells."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
    capability = int(re.search(r"\d+", target)[0])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        told = subprocess.run(
            [
                get_ptxas(capability).path,
                "-v",
                f"--gpu-name={target}",
                str(path),
                "-o",
                "/dev/null",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", told)
    return {
        "registers": int(re.search(r"Used (\d+) registers", told)[1]),
        "spill_bytes": max(int(spills[2]), int(spills[3])),
    }


def products(assembly: str) -> list[str]:
    """The matrix instructions in a kernel: the name of each with the type of its factors."""
    found = re.findall(r"^\s*(?:@%p\d+ )?(wgmma|mma)\S*?\.(\w+)\.\2[.\s]", assembly, re.MULTILINE)
    found += re.findall(r"(tcgen05)\.mma\S*?kind::(\w+)", assembly)
    found += re.findall(r"v_(mfma|wmma)_[if]32_\d+x\d+x\d+_([a-z0-9]+)", assembly)
    return sorted({f"{name} {kind}" for name, kind in found})


def builds(call: Call, *, attention_only: bool, with_resources: bool) -> Iterator[dict[str, Any]]:
    """Compile the launches of a call and tell what came out."""
    for launch in launches_of(call):
        name = launch.function.__name__
        if attention_only and not name.endswith("attention_kernel"):
            continue
        built = compile_launch(launch, call.arch)
        assembly = built.asm["ptx" if call.arch.startswith("sm_") else "amdgcn"]
        yield {
            "name": name,
            "smem_bytes": built.metadata.shared,
            "products": products(assembly),
            **(resources(assembly) if with_resources else {}),
        }


def main(text: str) -> None:
    """Compile what a JSON list of calls asks for; one line a launch."""
    for asked in json.loads(text):
        options = {name: asked.pop(name, False) for name in ("attention_only", "with_resources")}
        call = Call(**asked)
        own = {
            "limit_bytes": call.facts().smem_bytes,
            "bound_bytes": launches.smem_lower_bound(call.config(), call.key()),
            "maxnreg": call.config().maxnreg,
        }
        for made in builds(call, **options):
            sys.stdout.write(json.dumps({"call": asked, **own, **made}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
