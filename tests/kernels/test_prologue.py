"""Norm and rotary embedding of Q and K: emulation and kernel against the definition in fp64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from sage_plugin import attention
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels import launch_config
from sage_plugin.kernels.attention.api import with_prologue
from sage_plugin.kernels.attention.call import AttentionCall
from sage_plugin.kernels.attention.prologue import emulation
from sage_plugin.kernels.attention.prologue.record import QkNorm, QkStream, Rope
from tests.kernels.raw_builds import RawKernel

launch = pytest.importorskip("sage_plugin.kernels.attention.prologue.launch")


@dataclass(frozen=True)
class Row:
    """One form of the prologue.

    Attributes:
        kind: kind of the norm, `""` for none.
        table: `"half"` or `"whole"` width, `"heads"` for one of each head and batch item, `""` for
            no rotary embedding.
        turned: first and last token that is turned, all where the second is 0.
        text: tokens of a second stream in front, without an embedding.
    """

    batch: int
    tokens: int
    heads: int
    head_dim: int
    kind: str = "layer"
    across_heads: bool = False
    rounds_first: bool = False
    affine: bool = True
    bias: bool = True
    table: str = "half"
    interleaved: bool = True
    turned: tuple[int, int] = (0, 0)
    text: int = 0

    def norm(self, dtype: torch.dtype) -> QkNorm | None:
        if not self.kind:
            return None
        width = self.heads * self.head_dim if self.across_heads else self.head_dim
        weight = torch.rand(width).add(0.5).to(dtype) if self.affine else None
        bias = torch.randn(width).to(dtype) if self.affine and self.bias else None
        return QkNorm(self.kind, weight, bias, 1e-6, self.across_heads, self.rounds_first)

    def rope(self) -> Rope | None:
        if not self.table:
            return None
        first, last = self.turned if self.turned[1] else (0, self.tokens)
        shape = (last - first, self.head_dim // (1 if self.table == "whole" else 2))
        if self.table == "heads":
            shape = (self.batch, shape[0], self.heads, shape[1])
        return Rope(torch.randn(shape), torch.randn(shape), self.interleaved, first)

    def streams(self, dtype: torch.dtype, rope: Rope | None) -> list[QkStream]:
        def source(tokens: int) -> torch.Tensor:
            shape = (self.batch, self.heads, tokens, self.head_dim)
            return (torch.randn(shape) * 3 + 1).to(dtype).transpose(1, 2)

        text = [QkStream(source(self.text), self.norm(dtype))] if self.text else []
        return [*text, QkStream(source(self.tokens), self.norm(dtype), rope)]


ROWS = {
    "cogvideox": Row(2, 9, 3, 64, turned=(4, 9)),
    "wan": Row(2, 5, 3, 32, "rms", across_heads=True, bias=False),
    "flux": Row(1, 6, 3, 16, "rms", rounds_first=True, bias=False, table="whole", text=3),
    "hunyuan": Row(1, 7, 2, 32, "rms", turned=(0, 4)),
    "ltx": Row(2, 4, 2, 32, "rms", across_heads=True, table="heads"),
    "ltx2": Row(2, 4, 3, 16, "rms", across_heads=True, table="heads", interleaved=False),
    "sd3": Row(1, 5, 4, 8, "rms", bias=False, table="", text=2),
    "rotate_half": Row(1, 3, 1, 48, affine=False, table="whole", interleaved=False),
    "turned_alone": Row(1, 70, 2, 64, "", interleaved=False, turned=(1, 70)),
    "bias_rounded_apart": Row(1, 3, 2, 32, "rms", rounds_first=True),
    "layer_across_heads": Row(1, 3, 5, 8, across_heads=True),
    "copied": Row(1, 3, 2, 6, "", table="", text=2),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def oracle(streams: list[QkStream]) -> torch.Tensor:
    return torch.cat([_oracle(stream) for stream in streams], 1)


def _oracle(stream: QkStream) -> torch.Tensor:
    x, norm, rope = stream.source.double(), stream.norm, stream.rope
    if norm is not None:
        flat = x.flatten(2) if norm.across_heads else x
        weight, bias = (None if t is None else t.double() for t in (norm.weight, norm.bias))
        if norm.kind == "layer":
            flat = F.layer_norm(flat, flat.shape[-1:], weight, bias, norm.eps)
        else:
            flat = F.rms_norm(flat, flat.shape[-1:], weight, norm.eps)
            flat = flat if bias is None else flat + bias
        x = flat.view(x.shape)
    if rope is None:
        return x
    out, half = x.clone(), x.shape[-1] // 2
    channels = range(0, 2 * half, 2) if rope.interleaved else range(half)
    for pair, a in enumerate(channels):
        b = a + 1 if rope.interleaved else a + half
        at = (a, b) if rope.cos.shape[-1] == 2 * half else (pair, pair)
        for token in range(rope.rows):
            to = rope.skip + token
            cos, sin = ([_at(t, token, i) for i in at] for t in (rope.cos, rope.sin))
            out[:, to, :, a] = x[:, to, :, a] * cos[0] - x[:, to, :, b] * sin[0]
            out[:, to, :, b] = x[:, to, :, b] * cos[1] + x[:, to, :, a] * sin[1]
    return out


def _at(table: torch.Tensor, token: int, channel: int) -> torch.Tensor:
    return (table[token, channel] if table.dim() == 2 else table[:, token, :, channel]).double()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


LIMITS = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 3e-7}
"""Norm, weight and embedding round by half a unit in the last place each."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_the_emulation_is_the_definition_but_for_rounding(name, dtype):
    torch.manual_seed(0)
    streams = ROWS[name].streams(dtype, ROWS[name].rope())
    found = emulation.joined(streams)
    assert found.dtype == dtype
    assert error(found, oracle(streams)) <= (0 if name == "copied" else LIMITS[dtype])


@pytest.mark.usefixtures("interpreted", "nan_scratch")
@pytest.mark.parametrize("name", ROWS)
def test_the_kernel_is_the_emulation(name):
    for dtype in DTYPES:
        torch.manual_seed(0)
        rope = ROWS[name].rope()
        q, k = (ROWS[name].streams(dtype, rope) for _ in range(2))
        for found, streams in zip(launch.joined_pair(q, k), (q, k), strict=True):
            expected = emulation.joined(streams)
            assert found.dtype == dtype
            exact = oracle(streams)
            assert error(found, exact) <= 1.2 * error(expected, exact) + 1e-8
            assert error(found, expected.double()) <= 0.3 * LIMITS[dtype]  # few round otherwise


@pytest.fixture
def launches(monkeypatch):
    """How many tensors each launch has."""
    made, stock = [], launch.launch_graph.launch

    def counting(kernel, programs, sources, *rest, **options):
        made.append(len(sources))
        stock(kernel, programs, sources, *rest, **options)

    monkeypatch.setattr(launch.launch_graph, "launch", counting)
    return made


@pytest.mark.usefixtures("interpreted", "nan_scratch")
def test_q_and_k_share_a_launch_only_where_one_program_can_have_both(launches):
    row = ROWS["flux"]
    rope, other = row.rope(), row.rope()
    q, k = (row.streams(torch.float16, rope) for _ in range(2))
    short = [replace(k[0], source=k[0].source[:, :1]), k[1]]
    turned = [k[0], replace(k[1], rope=other)]
    named = [k[0], replace(k[1], norm=replace(k[1].norm, eps=1.0))]
    for keys, expected in (
        (k, [2, 2]), (short, [2, 1, 1]), (turned, [2, 1, 1]), (named, [2, 1, 1]), (k[1:], [1, 1, 1])
    ):  # fmt: skip
        launches.clear()
        found = launch.joined_pair(q, keys)
        assert launches == expected
        for made, streams in zip(found, (q, keys), strict=True):
            torch.testing.assert_close(made, emulation.joined(streams), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("interpreted", "nan_scratch")
def test_channels_that_are_apart_and_tokens_without_any_are_read_rightly():
    source = torch.randn(2, 5, 16, 3).transpose(2, 3)
    streams = [QkStream(source[:, :0]), QkStream(source, QkNorm("rms"))]
    torch.testing.assert_close(launch.joined(streams), emulation.joined(streams))


TABLES = {
    "pair": lambda angles: (angles.cos(), angles.sin()),
    "complex": lambda angles: torch.polar(torch.ones_like(angles), angles),
    "record": lambda angles: Rope(angles.cos(), angles.sin()),
}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("form", TABLES)
def test_attention_prepares_q_and_k_first(form, layout):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
    angles = torch.randn(20, 8)
    q_norm, k_norm = QkNorm("rms", torch.rand(16)), QkNorm("layer", torch.rand(16))
    rope = Rope(angles.cos(), angles.sin())
    prepared = (
        emulation.joined([QkStream(q, q_norm, rope)]),
        emulation.joined([QkStream(k, k_norm, rope)]),
    )
    heads_first = (lambda x: x.transpose(1, 2)) if layout == "bhsd" else (lambda x: x)
    given = {"kernel": "sage", "layout": layout}
    found = attention(
        *map(heads_first, (q, k, v)), **given, rope=TABLES[form](angles), q_norm=q_norm,
        k_norm=k_norm,
    )  # fmt: skip
    expected = attention(*map(heads_first, (*prepared, v)), **given)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_gradient_flows_through_norm_and_embedding():
    q = torch.randn(1, 2, 6, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(8, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(6, 4, dtype=torch.float64)

    def of(q, weight):
        norm = QkNorm("layer", weight)
        return attention(q, q, q, rope=(angles.cos(), angles.sin()), q_norm=norm, k_norm=norm)

    assert torch.autograd.gradcheck(of, (q, weight))


def made(q, k, layout, rope, q_norm=None, k_norm=None):
    """Q and K as attention takes them."""
    call = with_prologue(AttentionCall(q, k, k, layout=layout), rope, q_norm, k_norm)
    return call.q, call.k


def test_compilers_see_plain_operations():
    q, k = torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    rope, norm = Rope(torch.randn(4, 4), torch.randn(4, 4), skip=2), QkNorm("rms", torch.rand(8))

    def of(q, k):
        return made(q, k, "bshd", rope, norm, norm)

    torch._dynamo.reset()
    compiled = torch.compile(of, backend="eager", fullgraph=True)(q, k)
    for found, expected in zip(compiled, of(q, k), strict=True):
        torch.testing.assert_close(found, expected)


WRONG = {
    "kind": (lambda: QkNorm("batch"), "choose 'layer' or 'rms'"),
    "no norm": (lambda: _prepared(k_norm=torch.nn.RMSNorm(8)), "k_norm is RMSNorm; give a sage_pl"),
    "no tables": (lambda: _prepared(rope=([1], [2])), "cos is list; it needs a tensor of floats"),
    "integers": (
        lambda: _prepared(q_norm=QkNorm("rms", torch.ones(8, dtype=torch.int32))),
        r"the weight of q_norm is torch\.int32",
    ),
    "device": (
        lambda: _prepared(rope=(torch.ones(6, 8), torch.ones(6, 8, device="meta"))),
        "sin is on meta and q on cpu",
    ),
    "weight": (lambda: _prepared(q_norm=QkNorm("rms", torch.ones(16))), r"needs \(8,\)"),
    "bias": (lambda: _prepared(k_norm=QkNorm("rms", None, torch.ones(8), 1, True)), r"needs \(16"),
    "rows": (lambda: _prepared(rope=(torch.ones(7, 4), torch.ones(7, 4))), "as many rows"),
    "skip": (lambda: _prepared(rope=Rope(*torch.ones(2, 6, 4), skip=1)), "behind 1 tokens"),
    "width": (lambda: _prepared(rope=(torch.ones(6, 3), torch.ones(6, 3))), "half of them"),
    "pair": (lambda: _prepared(rope=(torch.ones(6, 4), torch.ones(5, 4))), "one shape"),
    "type": (lambda: _prepared(rope=torch.ones(6, 4)), "a complex tensor, or a Rope"),
    "layout": (lambda: _prepared(layout="bsd"), "choose 'bhsd' or 'bshd'"),
    "rank": (lambda: made(*torch.ones(2, 3, 4), "bhsd", None, QkNorm("rms")), "each needs 4"),
}


def _prepared(layout="bshd", rope=None, q_norm=None, k_norm=None):
    q_norm = q_norm or QkNorm("rms")
    return made(*torch.ones(2, 1, 6, 2, 8), layout, rope, q_norm, k_norm)


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_with_what_would(name):
    call, told = WRONG[name]
    with pytest.raises(UnsupportedInputError, match=told):
        call()


@pytest.fixture
def runs(monkeypatch):
    """Names of the kernels that builds ran on addresses; nothing is remembered before or after."""
    found: list[str] = []
    monkeypatch.setattr(launch, "prologue_kernel", RawKernel(launch.prologue_kernel, found))
    monkeypatch.setattr(launch.launch_graph, "_stream", lambda device: "stream")
    launch_config.forget()
    yield found
    launch_config.forget()


@pytest.mark.usefixtures("interpreted", "nan_scratch")
@pytest.mark.parametrize("name", ["cogvideox", "wan", "flux", "ltx2", "sd3", "copied"])
def test_the_third_call_of_a_form_is_replayed_with_its_own_tensors(name, runs):
    row = ROWS[name]
    for seed in range(4):
        torch.manual_seed(seed)
        rope = row.rope()
        q, k = (row.streams(torch.bfloat16, rope) for _ in range(2))
        found = launch.joined_pair(q, k)
        for made, streams in zip(found, (q, k), strict=True):
            expected = emulation.joined(streams)
            assert error(made, expected.double()) <= 0.3 * LIMITS[torch.bfloat16]
    assert len(runs) == 2 * (1 + (row.text > 0))
    alone = [launch.joined(q) for _ in range(3)][-1]
    assert torch.equal(alone, found[0])


@pytest.mark.usefixtures("interpreted", "nan_scratch")
def test_what_q_and_k_share_is_replayed_with_them(runs):
    row = ROWS["wan"]
    for seed in range(4):
        torch.manual_seed(seed)
        rope = row.rope()
        q, k = (row.streams(torch.bfloat16, rope) for _ in range(2))
        k = [replace(stream, norm=q[0].norm) for stream in k]
        alike = launch.joined_pair(q, q)
        assert torch.equal(*alike)
        _, made = launch.joined_pair(q, k)
        expected = emulation.joined(k).double()
        assert error(made, expected) <= 0.3 * LIMITS[torch.bfloat16]
    assert len(runs) == 2 * 2


@pytest.mark.usefixtures("interpreted")
def test_what_makes_another_build_or_cannot_be_told_apart_is_not_replayed(runs):
    row = ROWS["wan"]
    q, k = (row.streams(torch.bfloat16, row.rope()) for _ in range(2))
    shorter = [replace(q[0], source=q[0].source[:, :-1])]
    for _ in range(3):
        launch.joined_pair(q, shorter)  # one address, two sizes
    shifted = torch.zeros(q[0].source.numel() + 1, dtype=torch.bfloat16)[1:].as_strided(
        q[0].source.shape, q[0].source.stride()
    )
    for _ in range(2):
        launch.joined_pair(q, k)
    assert not runs
    launch.joined_pair([replace(q[0], source=shifted)], k)  # the first of its alignment
    assert not runs
    launch.joined_pair(q, k)
    assert len(runs) == 2
