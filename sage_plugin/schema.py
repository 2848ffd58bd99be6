"""The frozen records that cross package lines, and their JSON forms.

Every `from_json` is strict: an unknown, missing or wrongly typed field is a `ConfigError` that
names it. Units stand in the field names. Importing this module loads neither torch nor triton.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sage_plugin.json_record import JsonRecord as JsonRecord
from sage_plugin.key_numbers import NumbersOfKey
from sage_plugin.paged_records import PagedKey, PagedLaunch, PagedShape

SCHEMA_VERSION = 1

ATTENTION = "attention"
LINEAR = "linear"
GROUPED_LINEAR = "grouped_linear"

KERNELS = ("torch", "sdpa", "fav2", "sage", "fav3_sage", "fav3_fp8")
"""Kernel names of the attention family, plainest first."""

LINEAR_KERNELS = ("bf16", "fp8_tensor", "fp8_row", "int8_row")
"""Kernel names of linears, torch's own first."""

GROUPED_LINEAR_KERNELS = ("bf16", "fp8_row", "int8_row")
LINEAR_BACKENDS = ("torch", "triton", "emulation")

KERNEL_ALIASES = {"qk_int8": "sage"}
VARIANTS = ("portable", "hopper", "emulation")
NO_SPEEDS = ("emulation",)
"""Variants whose times say nothing of a kernel."""

LAYOUTS = ("bhsd", "bshd")
MASK_KINDS = ("none", "key_bias", "dense")


@dataclass(frozen=True, slots=True)
class LaunchConfig(JsonRecord):
    """The tunable numbers of one attention launch; the quantiser reads its blocks from here too.

    Attributes:
        block_m: query rows of a program.
        block_n: keys of a step, and the granule of the K scale.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        loads: `"pointer"`, or `"descriptor"` for TMA (sm_90 and newer).
        smooth_k: subtract the mean of K over keys before quantising it.
        smooth_v: subtract the mean of V over keys and add it back to the output.
        pv_flush: key blocks that stay in the tensor core's accumulator before they are added to the
            fp32 one; 1 is two-level accumulation at every block, 0 is never. Hopper variants take
            eight times as many for heads whose V does not drift along the sequence.
        maxnreg: register limit of a thread (NVIDIA), 0 for none.
        waves_per_eu: occupancy hint (AMD), 0 for none.
        matrix_instr_nonkdim: MFMA shape (AMD), 0 for the compiler's choice.
        hadamard: channels of a block of Q and K that are rotated together before they are
            quantised, a power of two that divides the head dim; 0 for no rotation.
        q_granule: query rows that share a scale, a power of two up to 128; 1 is a scale a row.
        exp_linear: eighths of a block's keys whose weights take their FP8 bits from a linear
            exponential, which needs no special-function unit (Hopper variants with FP8 values).
        overlap: start the scores of the next block before the values of this one are waited for
            (Hopper variants, where registers allow it).
        persistent: a program for each multiprocessor, which loads the queries and keys of its next
            tile while it ends one, instead of a program a tile (Hopper variants; tiles of causal
            calls, which differ in length, always have a program each).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    loads: str
    smooth_k: bool
    smooth_v: bool
    pv_flush: int
    maxnreg: int = 0
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0
    hadamard: int = 0
    q_granule: int = 1
    exp_linear: int = 0
    overlap: bool = False
    persistent: bool = False


@dataclass(frozen=True, slots=True)
class LinearLaunch(JsonRecord):
    """The tunable numbers of a product of quantized rows with a quantized weight.

    Attributes:
        block_m: rows of a tile of the output; block_n its columns.
        block_k: channels of a step.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
        group_m: blocks of rows that go through the columns together.
        loads: `"pointer"`, or `"descriptor"` for TMA (sm_90 and newer).
        programs: programs for each multiprocessor, which take tiles in turn; 0 for one a tile.
        maxnreg: register limit of a thread (NVIDIA), 0 for none.
        waves_per_eu: occupancy hint (AMD), 0 for none.
        matrix_instr_nonkdim: MFMA shape (AMD), 0 for the compiler's choice.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    loads: str = "pointer"
    programs: int = 0
    maxnreg: int = 0
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0


@dataclass(frozen=True, slots=True)
class CallKey(NumbersOfKey, JsonRecord):
    """What is known of an attention call without its data.

    Attributes:
        kernel: one of `KERNELS`; variant one of `VARIANTS`.
        head_dim: channels of a head of Q and K.
        dv: channels of a head of V.
        dtype: dtype of Q as torch spells it, without `torch.`.
        gqa_ratio: query heads per key head.
        causal: bottom-right aligned causal mask.
        mask_kind: one of `MASK_KINDS`.
        layout: `"bhsd"` or `"bshd"`.
        seq_q: query length; seq_k key length; batch_heads batch times query heads.
    """

    family: ClassVar[str] = ATTENTION
    NUMBERS: ClassVar[tuple[str, ...]] = ("seq_q", "seq_k", "batch_heads")
    LENGTHS: ClassVar[tuple[str, ...]] = ("seq_q", "seq_k")

    kernel: str
    variant: str
    head_dim: int
    dv: int
    dtype: str
    gqa_ratio: int
    causal: bool
    mask_kind: str
    layout: str
    seq_q: int
    seq_k: int
    batch_heads: int


@dataclass(frozen=True, slots=True)
class CallShape(JsonRecord):
    """The full shape of one recorded or synthetic attention call, before any selection of heads."""

    family: ClassVar[str] = ATTENTION

    batch: int
    heads_q: int
    heads_k: int
    seq_q: int
    seq_k: int
    head_dim: int
    dv: int
    dtype: str
    causal: bool
    mask_kind: str
    layout: str
    scale: float


@dataclass(frozen=True, slots=True)
class LinearShape(JsonRecord):
    """The shape of one linear call.

    Attributes:
        rows: rows of the input, M.
        in_features: channels of the input, K; out_features of the output, N.
        dtype: of input and output, as torch spells it, without `torch.`.
        bias: whether there is a bias.
        groups: weights of a grouped linear, each for some of the rows; 0 for a linear.
    """

    rows: int
    in_features: int
    out_features: int
    dtype: str
    bias: bool = False
    groups: int = 0

    @property
    def family(self) -> str:
        """The op family, by the groups."""
        return GROUPED_LINEAR if self.groups else LINEAR


@dataclass(frozen=True, slots=True)
class LinearKey(NumbersOfKey, JsonRecord):
    """What is known of a linear call without its data.

    Attributes:
        kernel: one of `LINEAR_KERNELS`; variant one of `LINEAR_BACKENDS`.
        in_features: channels of the input; out_features of the output.
        dtype: of the input, as torch spells it, without `torch.`.
        rows: rows of the input.
        groups: weights of a grouped linear, 0 for a linear.
    """

    NUMBERS: ClassVar[tuple[str, ...]] = ("rows",)
    LENGTHS: ClassVar[tuple[str, ...]] = ("rows",)

    kernel: str
    variant: str
    in_features: int
    out_features: int
    dtype: str
    rows: int
    groups: int = 0

    @property
    def family(self) -> str:
        """The op family, by the groups."""
        return GROUPED_LINEAR if self.groups else LINEAR


AnyShape = CallShape | LinearShape | PagedShape
AnyKey = CallKey | LinearKey | PagedKey
AnyLaunch = LaunchConfig | LinearLaunch | PagedLaunch


@dataclass(frozen=True, slots=True)
class DeviceFacts(JsonRecord):
    """Identity and limits of one device; the slug names its folder of configs.

    Attributes:
        slug: file-system safe name, e.g. `nvidia-h100-80gb-hbm3`.
        name: the driver's name.
        kind: `"cuda"`, `"hip"` or `"cpu"`.
        arch: `sm_90`, `gfx942` or the CPU's machine name.
        sm_count: multiprocessors or compute units; cores on a CPU.
        memory_bytes: device memory.
        smem_bytes: shared memory that one program may use.
        fp8_dtype: torch's name of the FP8 type of its matrix units, or `None`.
    """

    slug: str
    name: str
    kind: str
    arch: str
    sm_count: int
    memory_bytes: int
    smem_bytes: int
    fp8_dtype: str | None


@dataclass(frozen=True, slots=True)
class Toolchain(JsonRecord):
    """Versions that a measurement depends on; empty where not installed.

    Attributes:
        sage_plugin: this package.
        torch: PyTorch.
        triton: Triton.
        python: the interpreter.
        driver: the GPU's driver.
        kernels: hash of the measured kernels' sources; empty in records of earlier releases.
    """

    sage_plugin: str
    torch: str
    triton: str
    python: str
    driver: str
    kernels: str = ""


@dataclass(frozen=True, slots=True)
class Timing(JsonRecord):
    """A median of `n` samples with its 95 % interval, in milliseconds, and how it was taken."""

    median_ms: float
    low_ms: float
    high_ms: float
    n: int
    method: str


@dataclass(frozen=True, slots=True)
class ErrorMetrics(JsonRecord):
    """Error of an output against a reference, worst head where it says worst.

    Attributes:
        rel_l1: sum of absolute errors over sum of absolute reference values.
        cosine: cosine similarity of the flattened outputs.
        rmse: root mean square error.
        max_abs: largest absolute error.
        row_cosine_p10: 10th percentile of the cosine of each output row.
        worst_head_rel_l1: `rel_l1` of the worst head.
        worst_head_cosine: cosine of the worst head.
        gain: mean of the output over mean of the reference.
        centred_rel_l1: `rel_l1` after subtracting the mean of V over visible keys from both, on
            fp32.
        rounding_floor: centred `rel_l1` that rounding the reference to the output dtype alone
            gives.
        bad_values: NaN and infinite values in the output.
        worst_head_row_cosine_p10: `row_cosine_p10` of the worst head.
        suspect: what is wrong in a way that no number shows, such as a constant output; else empty.
        worst_head_centred_rel_l1: `centred_rel_l1` of the worst head; `None` in records of earlier
    """

    rel_l1: float
    cosine: float
    rmse: float
    max_abs: float
    row_cosine_p10: float
    worst_head_rel_l1: float
    worst_head_cosine: float
    gain: float
    centred_rel_l1: float
    rounding_floor: float
    bad_values: int
    worst_head_row_cosine_p10: float = 1.0
    suspect: str = ""
    worst_head_centred_rel_l1: float | None = None


@dataclass(frozen=True, slots=True)
class EntryEvidence(JsonRecord):
    """Why a registry entry holds what it holds.

    Attributes:
        time: time of the config, with quantisation.
        baseline_time: time of the baseline in the same measurement.
        baseline: the launch config that had to be beaten, as text.
        gain_low: lower end of the gain's interval; 0 for a confirmed baseline.
        errors: metrics of the worst head of the worst input.
        synthetic: the inputs were drawn, not recorded.
        inputs: checksums of the captures, or the synthetic distribution with its seed.
        run: name of the tuning run.
        toolchain: versions that were measured with.
        date: day of the measurement, UTC.
        confirmed: the baseline itself won.
        stamp: how far the times can be trusted (`clean`, `noisy`, `throttled`), or empty.
        host_time: time of the host's attention in the same measurement, `None` where unknown.
        measured_on: name of the device that was measured, where it is a sibling of the file's own
            with the same multiprocessors; empty for the file's own.
    """

    time: Timing
    baseline_time: Timing
    baseline: str
    gain_low: float
    errors: ErrorMetrics
    synthetic: bool
    inputs: tuple[str, ...]
    run: str
    toolchain: Toolchain
    date: str
    confirmed: bool = False
    stamp: str = ""
    host_time: Timing | None = None
    measured_on: str = ""


@dataclass(frozen=True, slots=True)
class RegistryEntry(JsonRecord):
    """One tuned config of attention: the key it was measured at, and the calls that it serves.

    Attributes:
        key: the call.
        seq_q_range: lowest and highest length of queries; likewise of keys.
        config: the launch config.
        evidence: why it is here.
        regret: the most that a call inside the ranges was seen to lose against its own best
            config, as a share; `None` where that was not measured.
        batch_heads_range: lowest and highest batch times query heads; `None` for any.
    """

    key: CallKey
    seq_q_range: tuple[int, ...]
    seq_k_range: tuple[int, ...]
    config: LaunchConfig
    evidence: EntryEvidence
    regret: float | None = None
    batch_heads_range: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class LinearEntry(JsonRecord):
    """One tuned config of a linear; as `RegistryEntry`, with the rows that it serves."""

    key: LinearKey
    rows_range: tuple[int, ...]
    config: LinearLaunch
    evidence: EntryEvidence
    regret: float | None = None


@dataclass(frozen=True, slots=True)
class PagedEntry(JsonRecord):
    """One tuned config of paged attention; as `RegistryEntry`, with the sizes that it serves."""

    key: PagedKey
    tokens_range: tuple[int, ...]
    max_keys_range: tuple[int, ...]
    config: PagedLaunch
    evidence: EntryEvidence
    regret: float | None = None


AnyEntry = RegistryEntry | LinearEntry | PagedEntry


@dataclass(frozen=True, slots=True)
class RegistryFile(JsonRecord):
    """A whole `<device_slug>/<family>.json`."""

    schema_version: int
    family: str
    device: DeviceFacts
    toolchain: Toolchain
    entries: tuple[AnyEntry, ...]


@dataclass(frozen=True, slots=True)
class Trial(JsonRecord):
    """One line of a run's `ledger.jsonl`: one config measured in one study.

    Attributes:
        study: hash that identifies key, kernel, inputs, space, gate, timer, device and toolchain.
        config: the launch config.
        stage: `"screen"` or `"final"`.
        status: `"ok"`, `"gate_failed"`, `"compile_error"`, `"run_error"`, `"crashed"`, `"timeout"`,
            `"mutates_input"` or `"illegal"`.
        reason: one sentence for every status but `ok`.
        time: time with quantisation.
        kernel_time: time of the attention launch alone.
        host_time: time of the host's attention in the same race.
        errors: metrics of the worst head of the worst capture.
        registers: of a thread, `None` where unknown; likewise spilled bytes.
        smem_bytes: shared memory of a program, `None` where unknown.
    """

    study: str
    config: AnyLaunch
    stage: str
    status: str
    reason: str = ""
    time: Timing | None = None
    kernel_time: Timing | None = None
    host_time: Timing | None = None
    errors: ErrorMetrics | None = None
    registers: int | None = None
    smem_bytes: int | None = None
    spills: int | None = None
    extra: dict[str, float] = field(default_factory=dict)
