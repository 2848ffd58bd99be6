"""Compile what a call would launch, for a GPU that is not here.

The launch code runs on CPU tensors with its kernels replaced by recorders; each recorded launch is
then compiled ahead of time from the very arguments that it was given. Run as a program, because
Triton decides at decoration whether it interprets:

    TRITON_INTERPRET=0 python -m scripts.aot_builds '[{"kernel": "sage", ...}]'

prints one line of JSON for each launch of each call; `-` reads the calls from stdin.
"""

from __future__ import annotations

import importlib
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
from sage_plugin.kernels.attention import dispatch, launch_space
from sage_plugin.kernels.attention.call import shape_of
from sage_plugin.kernels.attention.mask import mask_kind
from sage_plugin.kernels.attention.prologue.pair import QkPair
from sage_plugin.kernels.attention.prologue.record import QkNorm, QkStream
from sage_plugin.kernels.contract import AttentionParams, Decision, Packed
from sage_plugin.schema import CallKey, DeviceFacts, LaunchConfig
from scripts.aot_linears import LinearBuild, facts_of
from scripts.aot_paged import PagedBuild

TRITON_TYPES = {
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e4m3fnuz: "fp8e4b8",
}
OPTIONS = (
    "attention_only",
    "quantizers_only",
    "with_resources",
    "with_loops",
    "with_strays",
    "keep_going",
)


@dataclass(frozen=True)
class Call:
    """One attention call on one architecture.

    Attributes:
        seq: queries and keys; only whether programs share the last tiles depends on it, and a
            device of 100 multiprocessors has them do so at 2,048.
        mask: `""`, `"key_bias"` or `"dense"` (float), `"padding"` or `"tiles"` (bool).
        form: `""`; `"all"` for a window, a soft cap and sinks at once; `"packed"`.
        launch: fields changed in the default launch config.
        variant: `"portable"` or `"hopper"`.
        prologue: whether Q and K have a norm to come, and no LSE is wanted.
    """

    kernel: str
    arch: str
    dim: int
    dtype: str = "bfloat16"
    causal: bool = False
    return_lse: bool = False
    mask: str = ""
    form: str = ""
    launch: dict[str, Any] = field(default_factory=dict)
    variant: str = "portable"
    seq: int = 512
    prologue: bool = False

    def facts(self) -> DeviceFacts:
        """The device."""
        return facts_of(self.arch)

    def tensors(self) -> list[torch.Tensor]:
        """Q, K and V of a small grouped call; packed ones are bshd."""
        dtype = getattr(torch, self.dtype)
        every = [torch.zeros(1, heads, self.seq, self.dim, dtype=dtype) for heads in (4, 2, 2)]
        if self.form == "packed":
            return [t.transpose(1, 2).contiguous() for t in every]
        return every

    def problem(self) -> AttentionParams:
        """The call but for Q, K and V."""
        rows = self.seq if self.mask in ("dense", "tiles") else 1
        dtype = torch.bool if self.mask in ("padding", "tiles") else getattr(torch, self.dtype)
        mask = torch.zeros(1, 1, rows, self.seq, dtype=dtype) if self.mask else None
        half = self.seq // 2
        cu_seqlens = torch.tensor([0, half, self.seq], dtype=torch.int32)
        every = self.form == "all"
        packed = Packed(cu_seqlens, cu_seqlens, half, half)
        return AttentionParams(
            0.125,
            self.causal,
            "bshd" if self.form == "packed" else "bhsd",
            mask=mask,
            window=(64, 64) if every else (-1, -1),
            softcap=30.0 if every else 0.0,
            sinks=torch.zeros(4) if every else None,
            packed=packed if self.form == "packed" else None,
            lse=not self.prologue,
        )

    def key(self) -> CallKey:
        """The call key."""
        problem = self.problem()
        shape = shape_of(
            *self.tensors(),
            causal=self.causal,
            scale=problem.scale,
            layout=problem.layout,
            mask_kind=mask_kind(problem.mask),
            packed=problem.packed,
        )
        return dispatch.call_key(shape, Decision(self.kernel, self.variant))

    def config(self) -> LaunchConfig:
        """The architecture's default, with the call's own changes."""
        return dispatch.default_launch(self.key(), self.facts()).replaced(**self.launch)

    def bound_bytes(self) -> int:
        """Shared memory that it needs at least."""
        return launch_space.smem_lower_bound(self.config(), self.key())

    def load(self) -> Any:
        """The implementation, without another behind it."""
        from sage_plugin.kernels.attention.recipes import implementation

        fp8 = getattr(torch, self.facts().fp8_dtype or "float8_e4m3fn")
        built: Any = implementation(self.kernel, self.variant, fp8)
        if self.variant == "hopper":
            home = importlib.import_module("sage_plugin.kernels.attention.backends.hopper.launch")
            built = home.QuantizedHopper(built.recipe)
        return built

    def run(self) -> None:
        """Launch."""
        built = self.load()
        q, k, v = self.tensors()
        given: dict[str, Any] = {"problem": self.problem(), "launch": self.config()}
        if self.prologue:
            pair = QkPair(*((QkStream(x.transpose(1, 2), QkNorm("rms")),) for x in (q, k)))
            operands = built.prepare_unmade(pair, *pair.unmade("bhsd"), v, **given)
        else:
            operands = built.prepare(q, k, v, **given)
        built.launch(operands, return_lse=self.return_lse)


Build = Call | LinearBuild | PagedBuild
"""A call of any family."""


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


def launches_of(call: Build) -> list[Launch]:
    """What a call launches: quantization, then attention or a product."""
    call.load()
    kept: list[Launch] = []
    stock = [
        (module, name, value)
        for at, module in list(sys.modules.items())
        if at.startswith("sage_plugin.kernels.")
        for name, value in list(vars(module).items())
        if name.endswith("_kernel")
    ]
    for module, name, value in stock:
        setattr(module, name, Recorder(value, kept))
    of_device = device.facts
    device.facts = lambda _: call.facts()
    try:
        call.run()
    finally:
        device.facts = of_device
        for module, name, value in stock:
            setattr(module, name, value)
    return kept


def compile_launch(launch: Launch, arch: str) -> Any:
    """Compile a recorded launch with the specialisation that Triton's launcher would choose."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def kind_of(value: Any, at: tuple[int, ...], parameter: Any) -> Any:
        if isinstance(value, tuple) and not parameter.is_constexpr:
            assert not parameter.do_not_specialize, "Triton specializes integers in tuples"
            kinds = [kind_of(one, (*at, index), parameter) for index, one in enumerate(value)]
            return type(value)(*kinds) if hasattr(value, "_fields") else tuple(kinds)
        kind, aligned = _type_of(value)
        number = type(value) is int
        specialized = not (number and parameter.do_not_specialize)
        one = number and specialized and value == 1
        if parameter.is_constexpr or value is None or one:
            kind, constants[at] = "constexpr", value
        elif aligned and specialized:
            attributes[at] = [["tt.divisibility", 16]]
        return kind

    for index, parameter in enumerate(launch.function.params):
        value = launch.arguments[parameter.name]
        signature[parameter.name] = kind_of(value, (index,), parameter)
    if launch.function.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
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
        layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
        element = TRITON_TYPES[value.base.dtype]
        return f"tensordesc<{element}{list(value.block_shape)}{layout}>", False
    if isinstance(value, float):
        return "fp32", False
    if isinstance(value, bool):
        return "u1", False
    return "i32", isinstance(value, int) and value % 16 == 0


def resources(assembly: str) -> dict[str, Any]:
    """Registers a thread and bytes of spills, as the assembler of Triton's own toolchain tells.

    Of NVIDIA kernels also its warnings of products that it runs one after another (C75xx).
    """
    if ".amdgcn_target" in assembly:
        return {
            "registers": _amd(assembly, "vgpr_count"),
            "spill_bytes": _amd(assembly, "private_segment_fixed_size"),
        }
    target = re.search(r"^\.target (\w+)", assembly, re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(assembly)
        told = subprocess.run(
            [*(ptxas(target), "-v", f"--gpu-name={target}"), str(path), "-o", "/dev/null"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", told)
    return {
        "registers": int(re.search(r"Used (\d+) registers", told)[1]),
        "spill_bytes": max(int(spills[2]), int(spills[3])),
        "serialised": sorted(set(re.findall(r"C75\d\d[^\n]*", told))),
    }


def loops(cubin: bytes) -> list[dict[str, int]]:
    """The innermost loops with products in the machine code of an NVIDIA kernel.

    Of each: all instructions, products, special functions, comparisons of keys with positions, and
    accesses to local memory, which is where spilt values are.
    """
    told = _machine_code(cubin)
    code = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ +)?(\S+)([^;]*);", told)
    places = [(int(at, 16), name.split(".")[0], rest) for at, name, rest in code]
    spans = [
        (int(target[1], 16), at)
        for at, name, rest in places
        if name == "BRA" and (target := re.search(r"0x([0-9a-f]+)", rest))
        if int(target[1], 16) < at
    ]
    found = []
    for first, last in spans:
        inner = any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans)
        names = [name for at, name, _ in places if first <= at <= last]
        products = sum(name.endswith("GMMA") for name in names)
        if products and not inner:
            found.append(
                {
                    "instructions": len(names),
                    "products": products,
                    "special": names.count("MUFU"),
                    "selected": names.count("FSEL") + names.count("SEL"),
                    "local": names.count("LDL") + names.count("STL"),
                }
            )
    return found


def strays(cubin: bytes) -> list[str]:
    """Instructions that take the stack pointer, R1, for a number.

    So ptxas 12.8 and 12.9 build the second use of a pair of FP8 numbers that is packed with another
    pair, and a pair that is packed with itself.
    """
    unpacked = r"F2FP\.F16\.E4M3\.UNPACK_B R\d+, R1\b[^;]*|LOP3\.LUT R\d+, R1\b[^;]*"
    doubled = r"F2FP\.\S*E4M3\S*MERGE_C R\d+, (R\d+)(?:\.reuse)?, \1(?:\.reuse)?, R1\b[^;]*"
    told = _machine_code(cubin)
    return [found[0] for found in re.finditer(f"{unpacked}|{doubled}", told)]


def _machine_code(cubin: bytes) -> str:
    """The machine code of an NVIDIA kernel, disassembled."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-sass", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout


def ptxas(target: str) -> str:
    """Path of the assembler that Triton uses for a target such as `sm_90a`."""
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(int(re.search(r"\d+", target)[0])).path)


def _amd(assembly: str, name: str) -> int:
    """A number of the metadata of an AMD kernel."""
    return int(re.search(rf"^\s+\.{name}:\s+(\d+)", assembly, re.MULTILINE)[1])


def products(assembly: str) -> list[str]:
    """The matrix instructions in a kernel: the name of each with the type of its factors."""
    found = re.findall(r"^\s*(?:@%p\d+ )?(wgmma|mma)\S*?\.(\w+)\.\2[.\s]", assembly, re.MULTILINE)
    found += re.findall(r"(tcgen05)\.mma\S*?kind::(\w+)", assembly)
    found += re.findall(r"v_(mfma|wmma)_[if]32_\d+x\d+x\d+_?([a-z][a-z0-9]*)", assembly)
    return sorted({f"{name} {kind}" for name, kind in found})


def builds(
    call: Build,
    *,
    attention_only: bool,
    quantizers_only: bool,
    with_resources: bool,
    with_loops: bool,
    with_strays: bool,
) -> Iterator[dict[str, Any]]:
    """Compile the launches of a call and tell what came out."""
    for launch in launches_of(call):
        name = launch.function.__name__
        multiplies = name.endswith(("attention_kernel", "product_kernel"))
        if quantizers_only if multiplies else attention_only:
            continue
        built = compile_launch(launch, call.arch)
        assembly = built.asm["ptx" if call.arch.startswith("sm_") else "amdgcn"]
        yield {
            "name": name,
            "smem_bytes": built.metadata.shared,
            "products": products(assembly),
            **(resources(assembly) if with_resources else {}),
            **({"loops": loops(built.asm["cubin"])} if with_loops else {}),
            **({"strays": strays(built.asm["cubin"])} if with_strays else {}),
        }


def answers(asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One answer a launch of a call; with `keep_going`, a failure is an answer too."""
    options = {name: asked.pop(name, False) for name in OPTIONS}
    keep_going = options.pop("keep_going")
    kinds: dict[str, Any] = {"linear": LinearBuild, "paged": PagedBuild}
    call = next((kinds[name] for name in kinds if name in asked), Call)(**asked)
    try:
        own = {
            "limit_bytes": call.facts().smem_bytes,
            "bound_bytes": call.bound_bytes(),
            "config": call.config().to_json(),
        }
        for made in builds(call, **options):
            yield {"call": asked, **own, **made}
    except Exception as error:
        if not keep_going:
            raise
        yield {"call": asked, "error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def main(text: str) -> None:
    """Compile what a JSON list of calls asks for; one line a launch."""
    for asked in json.loads(sys.stdin.read() if text == "-" else text):
        for answer in answers(asked):
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
