"""The records: strict JSON both ways, every mistake named, nothing changed after it was made."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import types
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_plugin import schema
from sage_plugin.capture.record import AttentionCapture
from sage_plugin.errors import ConfigError
from sage_plugin.schema import (
    CallKey,
    CallShape,
    DeviceFacts,
    EntryEvidence,
    ErrorMetrics,
    JsonRecord,
    LaunchConfig,
    LinearEntry,
    LinearKey,
    LinearLaunch,
    LinearShape,
    PagedEntry,
    PagedKey,
    PagedLaunch,
    PagedShape,
    RegistryEntry,
    RegistryFile,
    Timing,
    Toolchain,
    Trial,
)
from tests.registry.samples import (
    CONFIG,
    ERRORS,
    FACTS,
    KEY,
    TOOLCHAIN,
    entry,
    file,
    linear_entry,
    timing,
)

RECORDS = tuple(
    x
    for x in vars(schema).values()
    if isinstance(x, type) and issubclass(x, JsonRecord) and x is not JsonRecord
)
SCALARS = {
    int: st.integers(-(2**60), 2**60),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=8),
    bool: st.booleans(),
}


def values(hint: object) -> st.SearchStrategy:
    """Any value that a type hint of a record allows."""
    if hint in SCALARS:
        return SCALARS[hint]
    if isinstance(hint, type) and issubclass(hint, JsonRecord):
        return records(hint)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return st.one_of(*(st.none() if a is types.NoneType else values(a) for a in inner))
    if origin is tuple:
        return st.lists(values(inner[0]), max_size=3).map(tuple)
    assert origin is dict, hint
    return st.dictionaries(st.text(max_size=5), values(inner[1]), max_size=3)


def records(of: type[JsonRecord]) -> st.SearchStrategy:
    """Any record of a class."""
    return st.builds(of, **{name: values(hint) for name, hint in hints(of).items()})


def hints(of: type[JsonRecord]) -> dict[str, object]:
    return {
        name: typing.get_type_hints(of)[name] for name in (f.name for f in dataclasses.fields(of))
    }


@pytest.mark.parametrize("of", RECORDS, ids=lambda of: of.__name__)
def test_a_round_trip_through_text_gives_the_record_back(of):
    @settings(max_examples=25, derandomize=True)
    @given(record=records(of))
    def check(record):
        text = json.dumps(record.to_json(), allow_nan=False)
        back = of.from_json(json.loads(text))
        assert back == record
        assert type(back) is of
        assert json.dumps(back.to_json()) == text
        assert list(record.to_json()) == [f.name for f in dataclasses.fields(of)]
        if not any(typing.get_origin(hint) is dict for hint in hints(of).values()):
            assert hash(back) == hash(record)

    check()


SAMPLE = {
    LaunchConfig: CONFIG,
    LinearLaunch: LinearLaunch(128, 256, 128, 8, 4),
    LinearShape: LinearShape(64, 128, 96, "bfloat16"),
    LinearKey: LinearKey("fp8_row", "torch", 128, 96, "bfloat16", 64),
    PagedLaunch: PagedLaunch(16, 64, 4, 3, splits=4),
    PagedShape: PagedShape((1, 5), (9, 5), 4, 2, 64, "bfloat16", "int8", 16, 64),
    PagedKey: PagedKey("fav2", "triton", "decode", 128, 4, "bfloat16", "int8", 64, 16, 8192, 16, 8),
    CallKey: KEY,
    DeviceFacts: FACTS,
    Toolchain: TOOLCHAIN,
    Timing: timing(),
    ErrorMetrics: ERRORS,
    EntryEvidence: entry().evidence,
    RegistryEntry: entry(),
    LinearEntry: linear_entry(),
    RegistryFile: file(entry()),
    CallShape: CallShape(1, 2, 2, 64, 64, 64, 64, "bfloat16", False, "none", "bhsd", 0.125),
    Trial: Trial("study", CONFIG, "final", "ok", time=timing(), errors=ERRORS),
}
SAMPLE[AttentionCapture] = AttentionCapture(
    schema_version=1, family="attention", file="0.safetensors", layer="transformer.block", step=0,
    timestep=999.0, call_index=0, shape=SAMPLE[CallShape], batch_indices=(0,), head_indices=(0, 1),
    strides_q=(1, 2, 3, 4), strides_k=(1, 2, 3, 4), strides_v=(1, 2, 3, 4), text_length=None,
    model_class="Model", config_hash="", versions={"torch": "2"}, sha256="ab",
)  # fmt: skip
SAMPLE[PagedEntry] = PagedEntry(
    SAMPLE[PagedKey], (1, 16), (4096, 8192), SAMPLE[PagedLaunch], entry().evidence
)
EVERY_FIELD = [(of, name) for of in RECORDS for name in hints(of)]


def data_of(of: type[JsonRecord]) -> dict[str, typing.Any]:
    return json.loads(json.dumps(SAMPLE[of].to_json()))


@pytest.mark.parametrize(("of", "name"), EVERY_FIELD)
def test_a_missing_field_is_named_or_has_its_default(of, name):
    data = data_of(of)
    del data[name]
    spec = {f.name: f for f in dataclasses.fields(of)}[name]
    if spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
        with pytest.raises(ConfigError, match=rf"{of.__name__}: field '{name}' is missing"):
            of.from_json(data)
    elif spec.default is not dataclasses.MISSING:
        assert getattr(of.from_json(data), name) == spec.default
    else:
        assert getattr(of.from_json(data), name) == spec.default_factory()


WRONG = ("text", 1, 1.5, True, None, [], [1], {}, {"a": object()}, [None], [[]])


def allows(hint: object, value: object) -> bool:
    """Whether a hint allows a value, said anew: JSON's types, and no bool for a number."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return any(value is None if a is types.NoneType else allows(a, value) for a in inner)
    if origin is tuple:
        return isinstance(value, list) and all(allows(inner[0], v) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(allows(inner[1], v) for v in value.values())
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


def is_record(hint: object) -> bool:
    """Whether a hint is a record, or one or nothing."""
    return any(a in RECORDS for a in (hint, *typing.get_args(hint)))


@pytest.mark.parametrize(("of", "name"), EVERY_FIELD)
def test_a_wrong_type_is_named_with_its_field(of, name):
    hint, refused = hints(of)[name], 0
    for value in WRONG:
        data = data_of(of) | {name: value}
        if allows(hint, value):
            found = getattr(of.from_json(data), name)
            assert found == (tuple(value) if isinstance(value, list) else value)
            continue
        refused += 1
        with pytest.raises(ConfigError) as error:
            of.from_json(data)
        inside = isinstance(value, dict) and is_record(hint)
        assert inside or f"{of.__name__}.{name}" in str(error.value)
    assert refused >= 4


@pytest.mark.parametrize("of", RECORDS, ids=lambda of: of.__name__)
def test_an_unknown_field_is_answered_with_those_that_are_allowed(of):
    with pytest.raises(ConfigError) as error:
        of.from_json(data_of(of) | {"BLOCK_M": 1})
    assert f"{of.__name__}: unknown field 'BLOCK_M'; allowed: " in str(error.value)
    for name in hints(of):
        assert name in str(error.value)


@pytest.mark.parametrize("of", RECORDS, ids=lambda of: of.__name__)
@pytest.mark.parametrize(
    ("data", "kind"), [([], "list"), (None, "null"), ("x", "str"), (3, "int"), (True, "bool")]
)
def test_only_an_object_is_a_record(of, data, kind):
    with pytest.raises(ConfigError, match=f"{of.__name__}: got {kind}, expected a JSON object"):
        of.from_json(data)


def test_report_114_a_mistake_deep_inside_is_named_where_it_is():
    data = data_of(RegistryFile)
    data["entries"][0]["config"]["num_warps"] = True
    with pytest.raises(
        ConfigError, match=r"LaunchConfig\.num_warps: got True \(bool\), expected int"
    ):
        RegistryFile.from_json(data)
    data = data_of(RegistryFile)
    data["entries"][0]["config"]["BLOCK_M"] = data["entries"][0]["config"].pop("block_m")
    with pytest.raises(ConfigError, match="LaunchConfig: unknown field 'BLOCK_M'"):
        RegistryFile.from_json(data)
    data = data_of(RegistryFile)
    data["entries"][0]["seq_q_range"] = [1, "2"]
    with pytest.raises(ConfigError, match=r"RegistryEntry\.seq_q_range\[1\]: got '2'"):
        RegistryFile.from_json(data)
    data = data_of(AttentionCapture)
    data["versions"]["torch"] = 2
    with pytest.raises(ConfigError, match=r"AttentionCapture\.versions\.torch: got 2"):
        AttentionCapture.from_json(data)


def test_a_whole_number_may_stand_for_a_float_and_becomes_one():
    found = Timing.from_json(data_of(Timing) | {"median_ms": 2})
    assert (found.median_ms, type(found.median_ms)) == (2.0, float)
    with pytest.raises(ConfigError, match=r"Timing\.median_ms.*too large"):
        Timing.from_json(data_of(Timing) | {"median_ms": 10**400})
    with pytest.raises(ConfigError, match=r"Timing\.n"):
        Timing.from_json(data_of(Timing) | {"n": 2.0})


@pytest.mark.parametrize("of", RECORDS, ids=lambda of: of.__name__)
def test_a_record_is_frozen_and_slotted(of):
    record = SAMPLE[of]
    name = next(iter(hints(of)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, None)
    assert not hasattr(record, "__dict__")


def test_a_nested_record_may_be_given_as_it_is():
    data = {"key": KEY, "config": CONFIG, "evidence": entry().evidence}
    ranges = {"seq_q_range": (1, 2), "seq_k_range": [3, 4]}
    found = RegistryEntry.from_json({**data, **ranges})
    assert found.key is KEY
    assert (found.seq_q_range, found.seq_k_range) == ((1, 2), (3, 4))


# -- launch configs and keys ------------------------------------------------------------------


def test_a_changed_copy_is_checked_like_any_other():
    changed = CONFIG.replaced(num_warps=8)
    assert (changed.num_warps, CONFIG.num_warps) == (8, 4)
    assert dataclasses.replace(changed, num_warps=4) == CONFIG
    with pytest.raises(ConfigError, match="unknown field 'BLOCK_M'"):
        CONFIG.replaced(BLOCK_M=64)
    with pytest.raises(ConfigError, match="num_warps"):
        CONFIG.replaced(num_warps="8")


@settings(max_examples=25, derandomize=True)
@given(config=records(LaunchConfig))
def test_the_text_of_a_config_gives_it_back_and_tells_configs_apart(config):
    assert LaunchConfig.from_json(json.loads(config.text())) == config
    assert config.text() == LaunchConfig.from_json(json.loads(config.text())).text()
    assert config.replaced(pv_flush=config.pv_flush + 1).text() != config.text()


def test_report_116_every_field_is_part_of_the_text():
    for name, value in CONFIG.to_json().items():
        other = {bool: not value, int: 77, str: "other"}[type(value)]
        assert CONFIG.replaced(**{name: other}).text() != CONFIG.text()
        assert CONFIG.replaced(**{name: other}) != CONFIG


def test_a_config_written_before_a_field_was_there_is_read_with_its_default():
    """Registry files outlive releases: what a writer did not know was off."""
    newer = ("hadamard", "q_granule", "exp_linear", "overlap", "persistent")
    data = data_of(RegistryFile)
    for name in newer:
        del data["entries"][0]["config"][name]
    assert RegistryFile.from_json(data) == file(entry())


def test_the_discrete_fields_and_the_numbers_are_all_of_a_key():
    names = [f.name for f in dataclasses.fields(CallKey)]
    assert KEY.discrete() == tuple(getattr(KEY, name) for name in names[:9])
    assert KEY.numbers() == tuple(getattr(KEY, name) for name in names[9:])
    assert names[9:] == ["seq_q", "seq_k", "batch_heads"]


def test_the_names_of_the_design():
    assert schema.KERNELS == ("torch", "sdpa", "fav2", "sage", "fav3_sage", "fav3_fp8")
    assert schema.KERNEL_ALIASES == {"qk_int8": "sage"}
    assert schema.LAYOUTS == ("bhsd", "bshd")
    assert set(schema.KERNEL_ALIASES.values()) <= set(schema.KERNELS)


def test_the_module_loads_without_torch():
    code = "import sys, sage_plugin.schema; assert not {'torch', 'triton'} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_field_of_several_records_takes_the_one_that_fits():
    row = {"shape": LinearShape(64, 128, 96, "bfloat16").to_json(), "config": CONFIG.to_json()}

    @dataclasses.dataclass(frozen=True, slots=True)
    class Several(JsonRecord):
        shape: schema.AnyShape
        config: schema.AnyLaunch | None

    globals()["Several"] = Several
    found = Several.from_json(row)
    assert found == Several(LinearShape(64, 128, 96, "bfloat16"), CONFIG)
    with pytest.raises(ConfigError, match="LinearShape: unknown field 'colour'"):
        Several.from_json(row | {"shape": row["shape"] | {"colour": 1}})
