"""Replayed calls: the numbers of a call that is run anew, and no tensor kept."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path

import pytest
import torch

from sage_plugin.kernels import launch_config, launch_graph
from sage_plugin.kernels.attention import executor
from sage_plugin.kernels.attention.call import AttentionCall, KernelRequest
from sage_plugin.kernels.contract import Packed
from tests.kernels.calls import Shape, draw, launch
from tests.kernels.raw_builds import LAUNCHED, RawKernel

pytestmark = pytest.mark.usefixtures("interpreted")

SHAPE = Shape(1, 4, 2, 70, 90, 64)


@pytest.fixture
def runs(monkeypatch):
    """Names of the kernels that builds ran on addresses; nothing is remembered before or after."""
    found: list[str] = []
    for module, name in LAUNCHED:
        monkeypatch.setattr(module, name, RawKernel(getattr(module, name), found))
    monkeypatch.setattr(launch_graph, "_stream", lambda device: "stream")
    launch_config.forget()
    yield found
    launch_config.forget()


def call_of(q, k, v, mask=None, **options):
    """A call with an output of fp32 and its LSE."""
    given = {"scale": 0.125, "return_lse": True, "out_dtype": torch.float32, **options}
    return AttentionCall(q, k, v, mask, **given)


def resolved(call, kernel, **options):
    return executor.resolve(call, KernelRequest(kernel, "portable", launch(**options)))


def repeated(known, calls):
    """The third call of a key, which its launch graph answers, after two with other tensors."""
    return [known.run_recorded(call) for call in calls][-1]


def mask_of(kind, seed):
    generator = torch.Generator().manual_seed(seed)
    if kind == "none":
        return None
    if kind == "padding":
        return torch.rand(1, 1, 1, SHAPE.seq_k, generator=generator) < 0.7
    if kind == "bias":
        return torch.randn(1, 1, 1, SHAPE.seq_k, generator=generator)
    if kind == "one row":
        return torch.rand(SHAPE.seq_k, generator=generator) < 0.7
    if kind == "expanded":
        row = torch.rand(1, 1, 1, SHAPE.seq_k, generator=generator) < 0.7
        return row.expand(1, SHAPE.heads_q, SHAPE.seq_q, SHAPE.seq_k)
    return torch.rand(1, 1, SHAPE.seq_q, SHAPE.seq_k, generator=generator) < 0.7


@pytest.mark.parametrize(
    ("kernel", "mask", "loads"),
    [
        ("fav2", "none", "pointer"),
        ("fav2", "rows", "pointer"),
        ("sage", "padding", "descriptor"),
        ("sage", "rows", "pointer"),
        ("fav3_sage", "none", "descriptor"),
        ("fav3_sage", "bias", "pointer"),
        ("fav3_fp8", "padding", "pointer"),
        ("fav3_fp8", "rows", "descriptor"),
    ],
)
def test_the_third_call_is_replayed_with_its_own_tensors(kernel, loads, mask, runs):
    calls = [call_of(*draw(SHAPE, torch.float16, seed=n), mask_of(mask, n)) for n in range(3)]
    known = resolved(calls[0], kernel, loads=loads)
    out, lse = repeated(known, calls)
    assert runs[-1].endswith("attention_kernel")
    assert len(runs) == {"fav2": 1}.get(kernel, 2) + (mask == "rows") * (1 + (kernel != "fav2"))
    right, right_lse = known.run_anew(calls[2])
    assert torch.equal(out, right)
    assert torch.equal(lse, right_lse)
    assert out.stride() == right.stride()


def test_a_long_call_quantizes_in_two_launches_from_zeroed_counters(runs, monkeypatch):
    from sage_plugin.kernels.quantize import schedule as prepass

    monkeypatch.setattr(prepass, "ONE_LAUNCH_VALUES", 0)
    monkeypatch.setattr(prepass, "PART_VALUES", 1024)
    prepass.plan_of.cache_clear()
    shape = Shape(1, 2, 2, 70, 200, 32)
    calls = [call_of(*draw(shape, torch.float16, seed=seed)) for seed in range(4)]
    known = resolved(calls[0], "fav3_sage")
    out, _ = repeated(known, calls[:3])
    assert runs == ["prepass_kernel", "prepass_kernel", "quantized_attention_kernel"]
    assert torch.equal(out, known.run_anew(calls[2])[0])
    assert torch.equal(known.run_recorded(calls[3])[0], known.run_anew(calls[3])[0])
    prepass.plan_of.cache_clear()


def test_packed_sequences_and_sinks_are_inputs_too(runs):
    calls = []
    for seed, ends in enumerate(([0, 30, 70], [0, 11, 70], [0, 69, 70])):
        q, k, v = draw(Shape(1, 4, 2, 70, 70, 32), torch.float16, layout="bshd", seed=seed)
        sinks = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        cu = [torch.tensor(ends, dtype=torch.int32) for _ in "qk"]
        packed = Packed(*cu, 70, 70)
        calls.append(call_of(q, k, v, is_causal=True, layout="bshd", sinks=sinks, packed=packed))
    known = resolved(calls[0], "sage")
    out, lse = repeated(known, calls)
    assert runs
    right, right_lse = known.run_anew(calls[2])
    assert torch.equal(out, right)
    assert torch.equal(lse, right_lse)


APART = torch.empty(1, 4, 70, 128, dtype=torch.float16)[..., :64]


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.5},
        {"softcap": 3.0},
        {"window": (5, 5)},
        {"attn_mask": torch.ones(1, 1, 1, 90, dtype=torch.bool)},
        {"sinks": torch.ones(4)},
        {"is_causal": True},
        {"q": APART},
        {"out_dtype": torch.bfloat16},
        {"return_lse": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_call_is_another_key(change):
    call = call_of(*draw(SHAPE, torch.float16))
    assert call.key() == call_of(*draw(SHAPE, torch.float16, seed=1)).key()
    assert call._replace(**change).key() != call.key()


def test_unaligned_inputs_run_anew(runs):
    q, k, v = draw(SHAPE, torch.float16)
    known = resolved(call_of(q, k, v), "sage")
    repeated(known, [call_of(q, k, v)] * 3)
    runs.clear()
    odd = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    assert odd.stride() == q.stride()
    assert odd.data_ptr() % launch_graph.POINTER_ALIGNMENT
    out, _ = known.run_recorded(call_of(odd, k, v))
    assert runs == []
    assert torch.equal(out, known.run_anew(call_of(q, k, v))[0])


def test_one_tensor_in_two_places_is_not_recorded_as_one(runs):
    q, k, v = draw(Shape(1, 2, 2, 64, 64, 32), torch.float16)
    known = resolved(call_of(q, q, v), "sage")
    repeated(known, [call_of(q, q, v)] * 3)
    assert runs == []
    out, _ = repeated(known, [call_of(q, k, v)] * 2)
    assert runs
    assert torch.equal(out, known.run_anew(call_of(q, k, v))[0])


def test_a_call_with_a_tensor_of_unknown_origin_is_never_replayed(runs, monkeypatch):
    from sage_plugin.kernels.quantize.triton import launch as quantizers

    stock = launch_graph.empty
    monkeypatch.setattr(
        quantizers.launch_graph,
        "empty",
        lambda device, dtype, *shape: torch.empty(shape, dtype=dtype),
    )
    call = call_of(*draw(SHAPE, torch.float16))
    repeated(resolved(call, "sage"), [call] * 4)
    assert runs == []
    assert stock is not launch_graph.empty


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_function_in_place_of_triton_s_hooks_is_one(name, monkeypatch):
    from triton import knobs

    assert not launch_graph.has_launch_hooks()
    monkeypatch.setattr(knobs.runtime, name, lambda metadata: None)
    assert launch_graph.has_launch_hooks()
    monkeypatch.setattr(knobs.runtime, name, None)
    assert not launch_graph.has_launch_hooks()


def test_a_launch_hook_sees_every_launch(runs, monkeypatch):
    from triton import knobs

    call = call_of(*draw(SHAPE, torch.float16))
    known = resolved(call, "sage")
    repeated(known, [call] * 3)
    runs.clear()

    def hook(metadata):
        del metadata

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        known.run_recorded(call)
        assert runs == []
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    known.run_recorded(call)
    assert runs


def test_recorded_launches_keep_no_tensor_alive(runs):
    tensors = draw(SHAPE, torch.float16)
    known = resolved(call_of(*tensors), "fav3_sage", loads="descriptor")
    out, lse = repeated(known, [call_of(*tensors)] * 3)
    storages = [weakref.ref(t) for t in (*tensors, out, lse)]
    del tensors, out, lse
    gc.collect()
    assert [ref() for ref in storages] == [None] * 5
    assert known.recorded is not None
    assert _inside(known.recorded) == []


def _inside(record):
    """The tensors that a launch graph reaches."""
    seen, found, todo = set(), [], [record]
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, launch_graph.LaunchGraph | tuple | list | dict) or hasattr(
            one, "block_shape"
        ):
            todo += gc.get_referents(one)
    return found


def test_every_launch_is_one_that_a_tape_knows():
    folder = Path(launch_graph.__file__).parent
    found = [
        f"{path.name}: {line.strip()}"
        for path in folder.rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"_kernels?\[", line)
    ]
    assert found == []
    assert "kernel[(programs,)](" in Path(launch_graph.__file__).read_text(encoding="utf-8")


def test_recordings_of_two_threads_stay_apart(runs):
    import threading

    seen = {}

    def record(name, value):
        with launch_graph.recording() as recorder:
            barrier.wait()
            launch_graph.empty(torch.device("cpu"), torch.float32, value)
            barrier.wait()
        seen[name] = [scratch.numel() for scratch, _ in recorder.scratch]

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=record, args=(n, n)) for n in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {3: [3], 5: [5]}


class _TupleKernel:
    """Takes its pointers and strides in tuples, and remembers what its build was handed."""

    __name__, arg_names = "tuple_kernel", ("operands", "count", "strides", "CONFIG")
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.given = []

    def __getitem__(self, grid):
        return lambda *args, **options: self

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        self.given.append(arguments)


def test_pointers_in_tuples_are_found_and_handed_over_in_tuples(monkeypatch):
    monkeypatch.setattr(launch_graph, "_stream", lambda device: "stream")
    kernel, q, out = _TupleKernel(), torch.zeros(64), torch.zeros(8, 8)
    config = frozenset({"BLOCK_M"})
    with launch_graph.recording() as recorder:
        scratch = launch_graph.empty(q.device, torch.float32, 32)
        operands = (q, None, scratch[4:])
        launch_graph.launch(kernel, 3, operands, 7, out.stride(), CONFIG=config)
    graph = launch_graph.graph_of(recorder, [q], (out, None))
    other = torch.zeros(64)
    again, _ = graph.replay([other.data_ptr()])
    [((first, nothing, inside), count, strides, constant)] = kernel.given
    assert first == other.data_ptr()
    assert nothing is None
    assert type(inside) is int
    assert (count, strides, constant) == (7, (8, 1), config)
    assert again.shape == out.shape


def test_a_pointer_in_a_tuple_of_a_tuple_is_handed_over_where_it_lay(monkeypatch):
    monkeypatch.setattr(launch_graph, "_stream", lambda device: "stream")
    kernel, q = _TupleKernel(), torch.zeros(64)
    with launch_graph.recording() as recorder:
        launch_graph.launch(kernel, 3, ((q,), 1), 7, (1,), CONFIG=0)
    graph = launch_graph.graph_of(recorder, [q], (torch.zeros(8), None))
    other = torch.zeros(64)
    graph.replay([other.data_ptr()])
    assert kernel.given == [(((other.data_ptr(),), 1), 7, (1,), 0)]
