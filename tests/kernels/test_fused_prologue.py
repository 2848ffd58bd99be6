"""Norm and rotary embedding in the pass that quantizes Q: the same operands as in two passes."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sage_plugin
from sage_plugin.kernels import launch_config
from sage_plugin.kernels.attention import executor
from sage_plugin.kernels.attention.api import with_prologue
from sage_plugin.kernels.attention.call import AttentionCall, KernelRequest
from sage_plugin.kernels.attention.prologue import apply, emulation
from sage_plugin.kernels.attention.prologue.agree import operands_agree
from sage_plugin.kernels.attention.prologue.one_pass import OnePass, one_pass_reason
from sage_plugin.kernels.attention.prologue.pair import QkPair
from sage_plugin.kernels.attention.prologue.record import QkNorm, QkStream, Rope
from sage_plugin.kernels.contract import AttentionParams, Decision, Packed
from tests.kernels.calls import QUANTIZED, launch
from tests.kernels.problems import implementation
from tests.kernels.raw_builds import LAUNCHED, RawKernel
from tests.kernels.test_prologue import DTYPES, ROWS

prologue_launch = pytest.importorskip("sage_plugin.kernels.attention.prologue.launch")

FORMS = {name: row for name, row in ROWS.items() if name != "copied"} | {
    "padded_halves": replace(ROWS["rotate_half"], head_dim=40, heads=2),
    "padded_pairs": replace(ROWS["flux"], head_dim=40, table="half"),
    "grouped": replace(ROWS["cogvideox"], heads=4),
}


def pair_of(name, dtype=torch.bfloat16):
    row = FORMS[name]
    torch.manual_seed(0)
    rope = row.rope()
    q, k = (row.streams(dtype, rope) for _ in range(2))
    if name == "grouped":
        row = replace(row, heads=2)
        k = row.streams(dtype, rope)
    return QkPair(tuple(q), tuple(k))


def tensors_of(operands):
    """All tensors of operands but those that this kernel leaves unwritten."""
    found = {f.name: getattr(operands, f.name) for f in dataclasses.fields(operands)}
    if operands.recipe.pv != "fp8":
        del found["v_residual"], found["v_unit"], found["v_drifts"]
    return {
        n: t.view(torch.uint8) if t.element_size() == 1 else t
        for n, t in found.items()
        if isinstance(t, torch.Tensor)
    }


def both(pair, kernel, layout="bhsd", **fields):
    """Operands of one pass and of two."""
    problem = AttentionParams(0.3, False, layout, lse=False)
    config, built = launch(block_m=16, block_n=32, **fields), implementation(kernel, "portable")
    q, k = pair.unmade(layout)
    plain = prologue_launch.joined_pair(pair.q, pair.k)
    if layout == "bhsd":
        plain = tuple(x.transpose(1, 2) for x in plain)
    v = torch.randn(plain[1].shape).to(plain[1].dtype)
    fused = built.prepare_unmade(pair, q, k, v, problem=problem, launch=config)
    apart = built.prepare(*plain, v, problem=problem, launch=config)
    return fused, apart


def assert_same(fused, apart):
    assert (fused.form, fused.seq_q, fused.seq_k) == (apart.form, apart.seq_q, apart.seq_k)
    expected = tensors_of(apart)
    found = tensors_of(fused)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].nan_to_num(9.0), tensor.nan_to_num(9.0)), name


@pytest.mark.usefixtures("interpreted", "nan_scratch")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kernel", QUANTIZED)
def test_operands_are_those_of_two_passes(kernel, name):
    """To the bit; what those are of is tested against the definition in `test_prologue`."""
    layout = "bshd" if kernel == "sage" else "bhsd"
    every = kernel == "sage" and name != "sd3"  # whose sums of fp32 are of eight channels or 32
    for dtype in DTYPES if every else DTYPES[:1]:
        assert_same(*both(pair_of(name, dtype), kernel, layout))


@pytest.mark.usefixtures("interpreted", "nan_scratch")
def test_rows_that_are_not_finite_are_zeros_with_an_infinite_scale_and_padding_has_none():
    pair = pair_of("flux")
    pair.q[1].source[0, 2, 1, 3] = torch.nan
    fused, apart = both(pair, "fav3_sage")
    assert_same(fused, apart)
    scale, text = fused.q_scale.view(1, 3, -1), 3
    assert scale[0, 1, text + 2] == torch.inf
    assert scale[..., : text + 6].isinf().sum() == 1
    assert (scale[..., text + 6 :] < 1e-30).all()


@pytest.fixture
def on_gpu(monkeypatch):
    """Kernels take CPU tensors, as on a GPU; nothing is remembered before or after."""
    monkeypatch.setattr(apply, "runs_on", lambda place: True)
    launch_config.forget()
    yield
    launch_config.forget()


@pytest.fixture
def runs(monkeypatch, on_gpu):
    """Names of the kernels that builds ran on addresses."""
    found: list[str] = []
    for home, name in (*LAUNCHED, (prologue_launch, "prologue_kernel")):
        monkeypatch.setattr(home, name, RawKernel(getattr(home, name), found))
    monkeypatch.setattr(prologue_launch.launch_graph, "_stream", lambda device: "stream")
    return found


def tensors(seed, tokens=40, heads=2, head_dim=32):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, heads, tokens, head_dim).half() for _ in range(3))
    angles = torch.randn(tokens - 3, head_dim)
    # Every second sine of a table is not aligned as its tensor is.
    rope = Rope(angles.cos()[:, 0::2], angles.sin()[:, 1::2], skip=3)
    norms = [QkNorm("rms", torch.rand(heads * head_dim), None, 1e-6, True) for _ in range(2)]
    return (q, k, v), {"rope": rope, "q_norm": norms[0], "k_norm": norms[1]}


@pytest.mark.usefixtures("interpreted", "nan_scratch", "unconfigured")
def test_a_known_call_repeats_all_its_launches_with_its_own_tensors(runs):
    request, ran = KernelRequest("sage", "portable", launch(block_m=16)), None
    for seed in range(4):
        qkv, prologue = tensors(seed)
        call = with_prologue(AttentionCall(*qkv), **prologue)
        ran = ran or executor.resolve(call, request)
        assert isinstance(ran, executor.Executor)
        assert ran.one_pass is None
        found, _ = ran.run_recorded(call)
        pair = map(emulation.joined, (call.prologue.q, call.prologue.k))
        q, k = (x.transpose(1, 2) for x in pair)
        apart = sage_plugin.attention(q, k, qkv[2], kernel="sage", launch=request.launch)
        made, _ = ran.run_recorded(call._replace(q=q, k=k, prologue=None))  # as in a capture
        torch.testing.assert_close(made, apart, rtol=0.01, atol=0.01)
        torch.testing.assert_close(found, apart, rtol=0.01, atol=0.01)
        assert found.stride() == apart.stride()
    replayed = ["prologue_kernel", "prepass_kernel", "quantized_attention_kernel"]
    assert runs == 2 * replayed


@pytest.mark.usefixtures("interpreted", "nan_scratch", "unconfigured", "on_gpu")
def test_what_is_computed_elsewhere_gets_q_and_k_of_one_pass(monkeypatch):
    """Kernels by name, the host's attention, the LSE, and a build that fails."""
    qkv, prologue = tensors(0)
    made = []
    stock = apply.joined_pair
    monkeypatch.setattr(apply, "runs_on_kernel", lambda streams: False)  # of the pass itself
    monkeypatch.setattr(apply, "joined_pair", lambda q, k: made.append(1) or stock(q, k))
    expected = sage_plugin.attention(*qkv, kernel="torch", **prologue)
    masked = {"attn_mask": torch.arange(40) < 30, "is_causal": True, "window": (9, -1)}
    portable = {"variant": "portable", "launch": launch(block_m=16)}
    rows = {
        "fav2": ({"kernel": "fav2"} | portable, 1),
        "emulation": ({"kernel": "sage"}, 1),
        "host": ({}, 1),
        "lse": ({"kernel": "sage", "return_lse": True} | portable, 1),
        "fused": ({"kernel": "sage"} | portable, 0),
        "fp8": ({"kernel": "fav3_fp8"} | portable, 0),
    }
    for name, (given, passes) in rows.items():
        made.clear()
        found = sage_plugin.attention(*qkv, **given, **prologue)
        out = found[0] if isinstance(found, tuple) else found
        torch.testing.assert_close(out, expected, rtol=0.05, atol=0.02, msg=name)
        assert len(made) == passes, name
    hidden = sage_plugin.attention(*qkv, kernel="torch", **masked, **prologue)
    out = sage_plugin.attention(*qkv, **rows["fused"][0], **masked, **prologue)
    torch.testing.assert_close(out, hidden, rtol=0.05, atol=0.03)

    def failing(pair, rows):
        raise RuntimeError("PassManager::run failed")

    from sage_plugin.kernels.attention.backends.triton import launch as backend

    monkeypatch.setattr(backend, "quantized_pair", failing)
    launch_config.forget()
    for _ in range(2):
        out = sage_plugin.attention(*qkv, **rows["fused"][0], **prologue)
        torch.testing.assert_close(out, expected, rtol=0.05, atol=0.02)


SAGE = Decision("sage", "portable")
PLAIN = AttentionParams(1.0, False, "bhsd", lse=False)
ENDS = torch.tensor([0, 4])
REASONS = {
    "fused": (SAGE, {}, PLAIN, None),
    "hopper": (Decision("fav3_fp8", "hopper"), {}, PLAIN, None),
    "fav2": (Decision("fav2", "portable"), {}, PLAIN, OnePass.UNQUANTIZED),
    "host": (Decision("sdpa", "host"), None, PLAIN, OnePass.UNQUANTIZED),
    "emulation": (Decision("sage", "emulation"), {}, PLAIN, OnePass.EMULATED),
    "lse": (SAGE, {}, replace(PLAIN, lse=True), OnePass.MEAN),
    "lse_without_mean": (SAGE, {"smooth_k": False}, replace(PLAIN, lse=True), None),
    "cap": (SAGE, {}, replace(PLAIN, softcap=1.0), OnePass.MEAN),
    "sinks": (SAGE, {}, replace(PLAIN, sinks=ENDS), OnePass.MEAN),
    "rotated": (SAGE, {"hadamard": 32}, PLAIN, OnePass.ROTATED),
    "granule": (SAGE, {"q_granule": 16}, PLAIN, OnePass.GRANULE),
    "packed": (SAGE, {}, replace(PLAIN, packed=Packed(ENDS, ENDS, 4, 4)), OnePass.PACKED),
}


@pytest.mark.parametrize("name", REASONS)
def test_why_it_is_a_pass_of_its_own(name):
    decision, fields, numbers, expected = REASONS[name]
    config = None if fields is None else launch(**fields)
    assert one_pass_reason(decision, config, numbers, pair_of("wan")) is expected


def test_the_page_has_every_reason():
    page = (Path(__file__).resolve().parents[2] / "docs" / "patch.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `") and line.count("|") == 3]
    assert {*rows} >= {f"| `{reason.name}` | {reason.value} |" for reason in OnePass}


def test_nothing_is_to_be_done_with_q_alone():
    pair = pair_of("wan")
    pair = QkPair((QkStream(pair.q[0].source),), pair.k)
    assert one_pass_reason(SAGE, launch(), PLAIN, pair) is OnePass.NOTHING


def changed(operands, name, change):
    return dataclasses.replace(operands, **{name: change(getattr(operands, name).clone())})


def off_by(rows, by):
    """Some rows of INT8 numbers with each closer to zero."""
    return lambda x: (x[:, :rows].sub_(by * x[:, :rows].sign()), x)[1]


CHANGES = {
    "itself": ("q8", lambda x: x, True),
    "a_step": ("q8", off_by(40, 1), True),
    "a_step_of_k": ("k8", off_by(40, 1), True),
    "a_row": ("q8", off_by(1, 30), False),
    "a_row_of_k": ("k8", off_by(1, 30), False),
    "a_scale": ("q_scale", lambda x: x * 1.2, False),
    "nan": ("k_scale", lambda x: x * torch.nan, False),
}


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", CHANGES)
def test_operands_agree_but_for_rounding(name):
    (q, k, v), _ = tensors(0)
    problem, built = AttentionParams(0.3, False, "bhsd"), implementation("sage", "portable")
    made = built.prepare(q, k, v, problem=problem, launch=launch(block_m=16))
    field, change, expected = CHANGES[name]
    assert operands_agree(changed(made, field, change), made) is expected


def test_q_that_is_not_made_has_a_form_and_no_values():
    pair = pair_of("flux")
    for layout in ("bhsd", "bshd"):
        made = emulation.joined(pair.q)
        made = made.transpose(1, 2) if layout == "bhsd" else made
        q, _ = pair.unmade(layout)
        told = (q.shape, q.stride(), q.dtype, q.device, q.requires_grad)
        assert told == (made.shape, made.stride(), made.dtype, made.device, False)
        assert q.transpose(1, 2).stride() == made.transpose(1, 2).stride()
        with pytest.raises(RuntimeError, match="reads Q or K before"):
            q.sum()


def test_forms_differ_by_alignment_and_tables():
    pair = pair_of("turned_alone")
    stream = pair.q[0]
    shifted = torch.zeros(stream.source.numel() + 1, dtype=stream.source.dtype)[1:]
    shifted = shifted.as_strided(stream.source.shape, stream.source.stride())
    rope = replace(stream.rope, cos=stream.rope.cos.clone())
    forms = {
        QkPair(q, pair.k).form()
        for q in (
            pair.q, (replace(stream, source=shifted),), (replace(stream, rope=rope),),
        )
    }  # fmt: skip
    assert len(forms) == 3
