"""Where registry files are, and how one is read: strictly, whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from sage_plugin import files, settings
from sage_plugin.errors import ConfigError
from sage_plugin.registry.entries import RECORDS, ranges
from sage_plugin.schema import (
    LAYOUTS,
    MASK_KINDS,
    SCHEMA_VERSION,
    AnyEntry,
    AnyKey,
    AnyLaunch,
    DeviceFacts,
    RegistryFile,
)

MAX_FILE_BYTES = 4 * 2**20
"""A device's tuned calls are kilobytes; a file beyond this is not one of ours."""

SPACES = "spaces"
"""Folder of the search spaces that come with the package, beside the configs of cards."""

POSITIVE_KEY_FIELDS = (
    "head_dim", "dv", "gqa_ratio", "seq_q", "seq_k", "batch_heads", "in_features", "out_features",
    "rows",
)  # fmt: skip
POSITIVE_CONFIG_FIELDS = ("block_m", "block_n", "block_k", "num_warps", "num_stages", "group_m")
OPTIONAL_CONFIG_FIELDS = ("pv_flush", "programs", "maxnreg", "waves_per_eu", "matrix_instr_nonkdim")
"""Fields of keys and configs of any family that has them."""
KEY_WORDS = {"mask_kind": MASK_KINDS, "layout": LAYOUTS}


def read(path: str | Path) -> RegistryFile:
    """Read one registry file.

    Raises:
        ConfigError: missing, unreadable, too large, not strict JSON, of another schema version,
            with an unknown, missing or wrongly typed field, or with an unsound entry.
    """
    return parse(files.read_text(Path(path), MAX_FILE_BYTES, "registry"), str(path))


def parse(text: str, where: str) -> RegistryFile:
    """Check and build a registry file from its text; `where` is what error messages name."""
    data = files.loads(text, where)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version != SCHEMA_VERSION:
        raise ConfigError(
            f"{where}: schema version {version}, this version of sage_plugin reads {SCHEMA_VERSION}"
        )
    try:
        file = RegistryFile.from_json(data)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    seen = set()
    for number, entry in enumerate(file.entries, start=1):
        for problem in entry_problems(entry):
            raise ConfigError(f"{where}: entry {number}: {problem}")
        if file.family in RECORDS and file.family != entry.key.family:
            raise ConfigError(
                f"{where}: entry {number}: is of {entry.key.family}, the file of {file.family}"
            )
        if entry.key in seen:
            raise ConfigError(f"{where}: entry {number}: its key stands twice in the file")
        seen.add(entry.key)
    return file


def entry_problems(entry: AnyEntry) -> list[str]:
    """List what contradicts itself in an entry, a sentence each; empty for a sound one."""
    key, time = entry.key, entry.evidence.time
    problems = _size_problems(key, POSITIVE_KEY_FIELDS, 1)
    problems += _size_problems(entry.config, POSITIVE_CONFIG_FIELDS, 1)
    problems += _size_problems(entry.config, OPTIONAL_CONFIG_FIELDS, 0)
    for name, words in KEY_WORDS.items():
        word = getattr(key, name, words[0])
        if word not in words:
            problems.append(f"{name} is {word!r}, expected one of {', '.join(words)}")
    for name, bounds in ranges(entry).items():
        length = getattr(key, name)
        if len(bounds) != 2 or not bounds[0] <= length <= bounds[1]:
            problems.append(f"{name}_range is {list(bounds)}, expected [low, high] around {length}")
    if entry.regret is not None and not 0 <= entry.regret < 1e6:
        problems.append(f"its regret is {entry.regret}, expected a share from 0 up")
    if not 0 < time.low_ms <= time.median_ms <= time.high_ms:
        problems.append(
            f"its time is {time.median_ms} ms in {time.low_ms}..{time.high_ms}, expected "
            "a positive median inside its interval"
        )
    return problems


def _size_problems(record: AnyKey | AnyLaunch, names: tuple[str, ...], low: int) -> list[str]:
    sizes = {name: getattr(record, name) for name in names if hasattr(record, name)}
    return [f"{n} is {size}, expected at least {low}" for n, size in sizes.items() if size < low]


def foreign_reason(file: RegistryFile, facts: DeviceFacts, family: str) -> str | None:
    """Say why a sound file is not for this device and family, or `None` if it is.

    A file never serves another device: names, not numbers alone, tell two chips apart.
    """
    if file.family != family:
        return f"holds {file.family!r} configs, expected {family!r}"
    if file.device.slug != facts.slug:
        return f"was tuned on {file.device.slug!r}, this device is {facts.slug!r}"
    if file.device.arch != facts.arch:
        return f"was tuned on {file.device.arch!r}, this device is {facts.arch!r}"
    return None


def search_path(
    slug: str, family: str = "attention", config_dir: str | Path | None = None
) -> list[tuple[str, Path]]:
    """List the files that are looked at for a device, in order, whether they exist or not."""
    roots = {
        "argument": None if config_dir is None else Path(os.path.expanduser(config_dir)),
        "env": settings.current().config_dir,
        "user": user_dir(),
        "shipped": shipped_dir(),
    }
    return [(label, file_path(root, slug, family)) for label, root in roots.items() if root]


def files_in_use(slug: str, config_dir: str | Path | None = None) -> list[tuple[str, Path]]:
    """List the files that there are for a device, of all families, place by place."""
    return [
        (label, file)
        for label, path in search_path(slug, config_dir=config_dir)
        for file in (path.with_name(f"{family}.json") for family in RECORDS)
        if file.exists()
    ]


def file_path(root: str | Path, slug: str, family: str = "attention") -> Path:
    """Return the registry file of a device and family under a folder of configs."""
    return Path(root) / slug / f"{family}.json"


def files_under(root: Path) -> list[Path]:
    """List the registry files under a folder of configs; search spaces are none."""
    return sorted(path for path in root.glob("*/*.json") if path.parent.name != SPACES)


def user_dir() -> Path | None:
    """Return the user's folder of configs; `None` without `platformdirs`, or without a home."""
    try:
        import platformdirs

        return platformdirs.user_config_path("sage_plugin")
    except (ImportError, RuntimeError, LookupError, OSError):
        return None


def shipped_dir() -> Path | None:
    """Package data of a wheel, or the `configs/` of the checkout of an editable install."""
    package = Path(__file__).resolve().parents[1]
    if (package / "configs").is_dir():
        return package / "configs"
    checkout = package.parent
    # A folder of this name beside a package in site-packages would be somebody else's.
    if (checkout / "pyproject.toml").is_file() and (checkout / "configs").is_dir():
        return checkout / "configs"
    return None
