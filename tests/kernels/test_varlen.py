"""`attention_varlen()`: packed sequences equal calls of their own, on every kernel."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch._dynamo.testing

import sage_plugin
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention.varlen import attention_varlen
from tests.kernels.calls import EMULATED, launch, relative_l1
from tests.matrix.definition import definition

EVERY = (*EMULATED, "torch", "sdpa", "auto")
EXACT = ("torch", "sdpa", "auto")
LENGTHS = (5, 128, 1)  # report 28
KEYS = (5, 70, 33)


@pytest.fixture(autouse=True)
def _alone(unconfigured):
    """No environment, no user's configs."""
    torch._dynamo.reset()


def ends(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def draw(lengths=LENGTHS, keys=LENGTHS, dtype=torch.float32, dim=64, heads=(4, 2), seed=0):
    """Packed Q, K and V whose means differ from sequence to sequence, and all but the options."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count, heads):
        return torch.randn(count, heads, dim, generator=generator)

    q, k, v = (
        normal(sum(lengths), heads[0]),
        normal(sum(keys), heads[1]),
        normal(sum(keys), heads[1]),
    )
    own = torch.repeat_interleave(torch.arange(len(keys)), torch.tensor(keys))
    k += 4.0 * torch.randn(len(keys), 1, dim, generator=generator)[own]
    v += 0.5 + own[:, None, None]
    tensors = tuple(x.to(dtype) for x in (q, k, v))
    return (*tensors, ends(lengths), ends(keys), max(lengths), max(keys))


def one_by_one(given, call):
    """What `call` makes of each sequence as `(1, H, S, D)` tensors, packed again."""
    q, k, v, ends_q, ends_k, _, _ = given
    outs, lses = [], []
    for n in range(len(ends_q) - 1):
        rows, keys = slice(*ends_q[n : n + 2].tolist()), slice(*ends_k[n : n + 2].tolist())
        out, lse = call(*(x[None, s].transpose(1, 2) for x, s in ((q, rows), (k, keys), (v, keys))))
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("kernel", EVERY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes_and_out_dtype(kernel, dtype):
    given = draw(dtype=dtype)
    narrow = attention_varlen(*given, kernel=kernel)
    wide = attention_varlen(*given, kernel=kernel, out_dtype=torch.float32)
    assert (narrow.dtype, wide.dtype) == (dtype, torch.float32)
    assert torch.equal(wide.to(dtype), narrow)


@pytest.mark.parametrize("kernel", EVERY)
def test_views_of_one_buffer_are_read_in_place_and_not_written(kernel):
    q, k, v, *rest = draw(heads=(2, 2))
    fused = torch.stack([q, k, v], 1)
    before = fused.clone()
    out = attention_varlen(*fused.unbind(1), *rest, kernel=kernel)
    torch.testing.assert_close(out, attention_varlen(q, k, v, *rest, kernel=kernel))
    assert torch.equal(fused, before)
    assert fused._version == 0


def test_report_95_a_gradient_flows_through_the_host_or_is_refused_by_name():
    q, k, v, *rest = draw((5, 9), (7, 9))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with pytest.raises(UnsupportedInputError, match="a gradient is needed"):
        attention_varlen(*leaves, *rest, kernel="sage")
    attention_varlen(*leaves, *rest, is_causal=True).square().sum().backward()
    ours = [x.grad.clone() for x in leaves]
    for x in leaves:
        x.grad = None
    one_by_one((*leaves, *rest), lambda *x: definition(*x, is_causal=True))[
        0
    ].square().sum().backward()
    for mine, x in zip(ours, leaves, strict=True):
        torch.testing.assert_close(mine, x.grad, rtol=1e-4, atol=1e-4)
    with pytest.raises(UnsupportedInputError, match=r"return_lse.*gradient"):
        attention_varlen(*leaves, *rest, return_lse=True)
    with torch.no_grad():
        attention_varlen(*leaves, *rest, kernel="sage")


# -- what is refused --------------------------------------------------------------------------

GIVEN = draw((5, 9), (7, 9))


def changed(**changes):
    names = list(inspect.signature(attention_varlen).parameters)[:7]
    return {**dict(zip(names, GIVEN, strict=True)), **changes}


@pytest.mark.parametrize("kernel", ["auto", "sage"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q": GIVEN[0][None]}, "4, 3 and 3 dimensions; packed ones need 3"),
        ({"v": GIVEN[2][:15]}, "do not fit together"),
        ({"k": GIVEN[1][..., :63]}, "do not fit together"),
        ({"q": GIVEN[0][:, :3]}, "3 query heads do not divide into 2 key heads"),
        ({"q": GIVEN[0].to("meta")}, "on meta, cpu and cpu"),
        ({"q": GIVEN[0].to(torch.int8)}, "each needs float16"),
        ({"cu_seqlens_q": ends((5, 9)).long()}, r"cu_seqlens_q is torch.int64.*it needs int32"),
        ({"cu_seqlens_k": ends((7, 9))[None]}, r"cu_seqlens_k is .*\(1, 3\).*\(sequences \+ 1,\)"),
        ({"cu_seqlens_k": ends((7, 9)).to("meta")}, r"on meta; it needs int32.*on cpu"),
        ({"cu_seqlens_k": ends((7, 5, 4))}, "of 2 sequences and cu_seqlens_k of 3"),
        ({"max_seqlen_q": 9.0}, "max_seqlen_q is 9.0; it needs an integer"),
        ({"max_seqlen_k": -1}, "max_seqlen_k is -1"),
        ({"max_seqlen_k": 8}, "a sequence of k has 9 rows and max_seqlen_k is 8"),
        ({"cu_seqlens_q": ends((5, 10))}, "needs to rise from 0 to the 14 rows of q"),
        ({"cu_seqlens_q": ends((5, 9)) + 1}, "needs to rise from 0"),
        ({"cu_seqlens_q": torch.tensor([0, 9, 5], dtype=torch.int32)}, "needs to rise from 0"),
        ({"sinks": torch.ones(2)}, r"one logit a query head, \(4,\)"),
        ({"window": (1, 2, 3)}, "two integers"),
        ({"softcap": -1}, "softcap is -1"),
        ({"out_dtype": torch.int8}, "out_dtype"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_answered_with_what_is_allowed(kernel, changes, words):
    with pytest.raises(UnsupportedInputError, match=words):
        attention_varlen(**changed(kernel=kernel, **changes))


def test_what_no_kernel_takes_is_named_or_runs_on_the_host():
    q, k, v, *rest = draw((5, 9), (7, 9), dim=264)
    with pytest.raises(UnsupportedInputError, match="head dim 264 is over 256"):
        attention_varlen(q, k, v, *rest, kernel="sage")
    out = attention_varlen(q, k, v[..., :8], *rest)
    exact, _ = one_by_one((q, k, v[..., :8], *rest), definition)
    assert relative_l1(out, exact) < 1e-5
    nothing = (q[:0], k, v, ends((0, 0)), rest[1], 0, 9)
    assert attention_varlen(*nothing).shape == (0, 4, 264)
    with pytest.raises(UnsupportedInputError, match="the call is empty"):
        attention_varlen(*(x[..., :64] for x in nothing[:3]), *nothing[3:], kernel="sage")


def test_a_launch_config_is_checked_and_used():
    given = draw()
    with pytest.raises(UnsupportedInputError, match="cannot run here: block_n 48"):
        attention_varlen(*given, kernel="sage", launch=launch(block_n=48))
    smooth, rough = (
        attention_varlen(*given, kernel="sage", launch=launch(smooth_k=x)) for x in (True, False)
    )
    exact, _ = one_by_one(given, definition)
    assert relative_l1(smooth, exact) < relative_l1(rough, exact)


# -- the ops ----------------------------------------------------------------------------------

VARLEN = torch.ops.sage_plugin.attention_varlen.default
VARLEN_LSE = torch.ops.sage_plugin.attention_varlen_with_lse.default
BOTH = pytest.mark.parametrize("op", [VARLEN, VARLEN_LSE], ids=lambda op: op._schema.name)
FORMS = ("plain", "transposed", "fused", "one_head")


def arguments(kernel, form="plain", sinks=None, dim=80, dv=80):
    q, k, v, *rest = draw(dtype=torch.bfloat16, dim=dim, heads=(2, 2))
    if form == "transposed":
        q = q.transpose(0, 1).contiguous().transpose(0, 1)
    elif form == "fused":
        q, k, v = torch.stack([q, k, v], 1).unbind(1)
    elif form == "one_head":
        q, k, v = (x[:, :1] for x in (q, k, v))
    variant, config = ("host", "") if kernel in EXACT else ("emulation", launch().text())
    numbers = (sinks, 0.1, True, -1, 0, 0.0, kernel, variant, config, "", None)
    return (q, k, v[..., :dv], *rest, *numbers)


@BOTH
@pytest.mark.parametrize(
    ("form", "kernel"), [*zip(FORMS, ("torch", "fav2", "fav3_sage", "torch"), strict=True)]
)
def test_report_74_opcheck_is_clean(op, kernel, form):
    sinks = torch.randn(1 if form == "one_head" else 2)
    torch.library.opcheck(op, arguments(kernel, form, sinks))


@BOTH
@pytest.mark.parametrize("kernel", [*EMULATED, "torch", "sdpa"])
def test_report_74_the_fake_has_the_strides_of_the_real_one(op, kernel):
    for form in FORMS:
        for dv in (80, 48) if kernel in EXACT else (80,):
            given = arguments(kernel, form, dv=dv)
            away = (x.to("meta") if isinstance(x, torch.Tensor) else x for x in given)
            real, fake = op(*given), op(*away)
            pairs = [(real, fake)] if op is VARLEN else zip(real, fake, strict=True)
            for mine, told in pairs:
                assert mine.shape == told.shape
                assert mine.stride() == told.stride(), form
                assert mine.dtype == told.dtype


def block(q, k, v, ends_q, ends_k, longest_q, longest_k, **options):
    out, lse = attention_varlen(
        q * 1.5, k, v, ends_q, ends_k, longest_q, longest_k, return_lse=True, **options
    )
    return out.flatten(1) + 1, lse * 2


@pytest.mark.parametrize("kernel", ["sage", "fav2", "auto"])
def test_report_75_new_lengths_and_numbers_of_sequences_recompile_at_most_once(kernel):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    with torch.no_grad():
        for lengths in ((5, 40), (3, 4, 70), (31, 30, 29, 28)):
            given = draw(lengths, tuple(n + 3 for n in lengths))
            for mine, eager in zip(
                compiled(*given, kernel=kernel), block(*given, kernel=kernel), strict=True
            ):
                assert torch.equal(mine, eager)
    assert counter.frame_count <= 2


def test_it_is_a_public_name():
    assert sage_plugin.attention_varlen is attention_varlen
