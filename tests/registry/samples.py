"""Sound keys, entries and devices that tests change one field of."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sage_plugin.registry.merge import MergeReport, merge
from sage_plugin.schema import (
    CallKey,
    DeviceFacts,
    EntryEvidence,
    ErrorMetrics,
    LaunchConfig,
    LinearEntry,
    LinearKey,
    LinearLaunch,
    RegistryEntry,
    RegistryFile,
    Timing,
    Toolchain,
)

FACTS = DeviceFacts(
    slug="nvidia-h100-80gb-hbm3", name="NVIDIA H100 80GB HBM3", kind="cuda", arch="sm_90",
    sm_count=132, memory_bytes=80 * 2**30, smem_bytes=227 * 2**10, fp8_dtype="float8_e4m3fn",
)  # fmt: skip
TOOLCHAIN = Toolchain(
    sage_plugin="0.1.0", torch="2.13.0", triton="3.6.0", python="3.11.7", driver="580"
)
KEY = CallKey(
    kernel="fav3_sage", variant="portable", head_dim=64, dv=64, dtype="bfloat16", gqa_ratio=1,
    causal=False, mask_kind="none", layout="bhsd", seq_q=1024, seq_k=1024, batch_heads=16,
)  # fmt: skip
CONFIG = LaunchConfig(
    block_m=128, block_n=64, num_warps=4, num_stages=3, loads="pointer", smooth_k=True,
    smooth_v=False, pv_flush=1,
)  # fmt: skip
ERRORS = ErrorMetrics(
    rel_l1=0.01, cosine=0.999, rmse=0.01, max_abs=0.1, row_cosine_p10=0.99,
    worst_head_rel_l1=0.02, worst_head_cosine=0.998, gain=1.0, centred_rel_l1=0.01,
    rounding_floor=0.001, bad_values=0,
)  # fmt: skip


def key(**changes: object) -> CallKey:
    """`KEY` with some fields changed."""
    return dataclasses.replace(KEY, **changes)


def config(**changes: object) -> LaunchConfig:
    """`CONFIG` with some fields changed."""
    return CONFIG.replaced(**changes)


def timing(median_ms: float = 1.0, method: str = "events") -> Timing:
    """A timing with a narrow interval."""
    return Timing(median_ms, 0.99 * median_ms, 1.01 * median_ms, 20, method)


def evidence(gain_low: float = 0.05, **changes: object) -> EntryEvidence:
    """Evidence of captures with the given lower bound of the gain."""
    sound = EntryEvidence(
        time=timing(0.9), baseline_time=timing(1.0), baseline="default", gain_low=gain_low,
        errors=ERRORS, synthetic=False, inputs=("sha256:aa",), run="run-1", toolchain=TOOLCHAIN,
        date="2026-11-20",
    )  # fmt: skip
    return dataclasses.replace(sound, **changes)


def entry(
    of: CallKey = KEY,
    launch: LaunchConfig = CONFIG,
    *,
    because: EntryEvidence | None = None,
    seq_q_range: tuple[int, int] | None = None,
    seq_k_range: tuple[int, int] | None = None,
) -> RegistryEntry:
    """An entry that serves its own lengths unless ranges are given."""
    return RegistryEntry(
        key=of,
        seq_q_range=seq_q_range or (of.seq_q, of.seq_q),
        seq_k_range=seq_k_range or (of.seq_k, of.seq_k),
        config=launch,
        evidence=because or evidence(),
    )


LINEAR_KEY = LinearKey("int8_row", "triton", 512, 1024, "bfloat16", 1024)
LINEAR_CONFIG = LinearLaunch(block_m=64, block_n=64, block_k=128, num_warps=4, num_stages=3)


def linear_entry(
    of: LinearKey = LINEAR_KEY,
    launch: LinearLaunch = LINEAR_CONFIG,
    *,
    rows_range: tuple[int, int] | None = None,
) -> LinearEntry:
    """An entry of a linear that serves its own rows unless a range is given."""
    return LinearEntry(of, rows_range or (of.rows, of.rows), launch, evidence())


def file(*entries: RegistryEntry | LinearEntry, facts: DeviceFacts = FACTS) -> RegistryFile:
    """A registry file of one device."""
    family = entries[0].key.family if entries else "attention"
    return RegistryFile(1, family, facts, TOOLCHAIN, entries)


def merged(
    path: Path, *entries: RegistryEntry | LinearEntry, facts: DeviceFacts = FACTS, **options: float
) -> MergeReport:
    """Merge entries into a file."""
    family = entries[0].key.family
    return merge(path, entries, family=family, facts=facts, toolchain=TOOLCHAIN, **options)
