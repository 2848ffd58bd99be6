"""The torch ops: what a compiler is told is what happens, and every output is written."""

from __future__ import annotations

import itertools
import os
import shutil

import pytest
import torch
import torch._dynamo.testing

import sage_plugin
from sage_plugin.errors import UnsupportedInputError
from sage_plugin.kernels.attention import torch_ops
from sage_plugin.kernels.attention.call import shape_of
from sage_plugin.schema import CallShape
from tests.kernels.calls import EMULATED, LIMITS, Shape, draw, launch, relative_l1

assert torch_ops.library, "the ops are registered by its import"
LAUNCH = launch().text()
HOSTED = ("torch", "sdpa")
ATTENTION = torch.ops.sage_plugin.attention.default
WITH_LSE = torch.ops.sage_plugin.attention_with_lse.default
BOTH = pytest.mark.parametrize("op", [ATTENTION, WITH_LSE], ids=lambda op: op._schema.name)


@pytest.fixture(autouse=True)
def _alone(unconfigured):
    """No environment, no user's configs."""
    torch._dynamo.reset()


def arguments(
    kernel, *, layout="bhsd", causal=True, form="plain", dv=80, out_dtype=None, mask=None,
    sinks=None,
):  # fmt: skip
    """The arguments of an op: 2 x 4:2 heads of 80 channels, in some memory form."""
    q, k, v = draw(Shape(2, 4, 2, 20, 33, 80), torch.bfloat16, layout=layout)
    if form == "transposed":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif form == "expanded":
        k, v = (x[:1].expand(2, -1, -1, -1) for x in (k, v))
        q = q[:, :, :1].expand(q.shape)
    elif form == "sliced":
        q = torch.stack([q, q], 3)[:, :, :, 1]
    variant, config = ("host", "") if kernel in HOSTED else ("emulation", LAUNCH)
    numbers = (0.1, causal, -1, -1, 0.0, kernel, variant, layout, config, "", out_dtype)
    return (q, k, v[..., :dv], mask, sinks, *numbers)


FORMS = ("plain", "transposed", "expanded", "sliced")
KERNELS = ("torch", "sdpa", "fav2", "fav3_sage")


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


# -- what the compiler is told ----------------------------------------------------------------


# Each memory form and each mask once with every op; kernels take turns, as nothing that is checked
# but the strides of outputs is theirs, which the test after these sees for all of them.
@BOTH
@pytest.mark.parametrize(("form", "kernel"), [*zip(FORMS, KERNELS, strict=True)])
def test_report_74_opcheck_is_clean(op, kernel, form):
    torch.library.opcheck(op, arguments(kernel, form=form))


@BOTH
@pytest.mark.parametrize(
    ("kernel", "mask", "sinks"),
    [
        ("torch", torch.ones(2, 1, 1, 33), None),
        ("fav3_sage", torch.arange(33).expand(1, 1, 1, 33) > 4, torch.randn(4)),
        ("fav2", torch.linspace(-2, 2, 20)[None, None, :, None].expand(1, 1, 20, 33), None),
        ("sdpa", torch.randn(2, 33, 4, 20).permute(0, 2, 3, 1).bfloat16(), torch.randn(4)),
    ],
    ids=["key_bias", "bool", "expanded", "transposed"],
)
def test_report_74_opcheck_is_clean_with_mask_and_sinks(op, kernel, mask, sinks):
    torch.library.opcheck(op, arguments(kernel, form="transposed", mask=mask, sinks=sinks))


def assert_told(op, given, form):
    """The fake and the real op give outputs of one form; the real ones."""
    real = outputs(op(*given))
    fake = outputs(op(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in given)))
    for mine, told in zip(real, fake, strict=True):
        assert mine.shape == told.shape
        assert mine.stride() == told.stride(), form
        assert mine.dtype == told.dtype
        assert mine.storage_offset() == told.storage_offset() == 0
    return real


@BOTH
@pytest.mark.parametrize("kernel", [*HOSTED, *EMULATED])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_report_74_the_fake_has_the_strides_of_the_real_one(op, kernel, layout):
    for form, out_dtype, causal in itertools.product(FORMS, (None, torch.float32), (False, True)):
        given = arguments(kernel, layout=layout, form=form, out_dtype=out_dtype, causal=causal)
        assert assert_told(op, given, form)[0].dtype == (out_dtype or torch.bfloat16)


@BOTH
@pytest.mark.parametrize("kernel", HOSTED)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_host_kernels_take_a_v_of_other_width(op, kernel, layout):
    for form in FORMS:
        given = arguments(kernel, layout=layout, form=form, dv=48)
        assert assert_told(op, given, form)[0].shape[3] == 48


def test_report_86_the_lse_owns_its_storage():
    for kernel in (*HOSTED, *EMULATED):
        _, lse = WITH_LSE(*arguments(kernel, layout="bshd"))
        assert lse.is_contiguous()
        assert lse.dtype == torch.float32
        assert lse.untyped_storage().nbytes() == lse.numel() * 4


# -- what is written --------------------------------------------------------------------------


ELSEWHERE = (
    "routed", "quantize_rows", "quantize_rows_once", "multiply_rows", "grouped_linear",
    "grouped_product", "paged_attention", "paged_attention_with_lse",
)  # fmt: skip


def registered() -> set[str]:
    """The names of all ops in our namespace."""
    names = (schema.name for schema in torch._C._jit_get_all_schemas())
    return {name for name in names if name.startswith("sage_plugin::")}


def test_the_registered_ops_are_those_that_are_tested_here():
    """Packed sequences have their tests in `test_varlen`, the others in folders of their own."""
    plain = {ATTENTION._schema.name, WITH_LSE._schema.name}
    elsewhere = {f"sage_plugin::{name}" for name in ELSEWHERE}
    assert registered() - elsewhere == plain | {
        name.replace("attention", "attention_varlen") for name in plain
    }


@BOTH
@pytest.mark.parametrize("kernel", [*HOSTED, *EMULATED])
@pytest.mark.usefixtures("nan_scratch")
def test_report_71_every_op_writes_all_of_its_output(op, kernel):
    """The real implementation is what runs, not the fake one that returns empty tensors."""
    for layout in ("bhsd", "bshd"):
        for x in outputs(op(*arguments(kernel, layout=layout))):
            assert not x.isnan().any()
            assert x[x.isfinite()].float().abs().sum() > 0


@pytest.mark.parametrize("kernel", ["torch", "fav3_sage"])
def test_report_71_compiled_ops_write_all_of_their_output(kernel):
    given = arguments(kernel)
    tensors, rest = given[:3], given[3:]
    assert rest[:2] == (None, None)
    for op in (ATTENTION, WITH_LSE):
        compiled = torch.compile(lambda q, k, v, op=op: op(q, k, v, *rest), backend="aot_eager")
        for mine, eager in zip(outputs(compiled(*tensors)), outputs(op(*given)), strict=True):
            assert torch.equal(mine, eager)


# -- compilation ------------------------------------------------------------------------------


def block(q, k, v, kernel, **options):
    """What a model does around attention: something before it, something after it."""
    out = sage_plugin.attention(q * 1.5, k, v, kernel=kernel, **options)
    return out.transpose(1, 2).flatten(2) + 1


@pytest.mark.parametrize(
    ("kernel", "causal"),
    [("sage", True), ("fav2", False), ("torch", True), ("sdpa", False), ("auto", True)],
)
def test_report_73_a_function_with_attention_compiles_without_a_break(kernel, causal):
    tensors = draw(Shape(1, 4, 2, 40, 50, 80))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out = compiled(*tensors, kernel, is_causal=causal)
        assert torch.equal(out, block(*tensors, kernel, is_causal=causal))


def test_report_73_the_lse_and_a_launch_config_compile_too():
    tensors = draw(Shape(1, 2, 2, 40, 50, 64))

    def both(q, k, v, config):
        out, lse = sage_plugin.attention(
            q, k, v, kernel="fav3_sage", return_lse=True, out_dtype=torch.float32, launch=config
        )
        return out * 2, lse + 1

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    smooth, rough = launch(), launch(smooth_k=False)
    with torch.no_grad():
        assert not torch.equal(both(*tensors, smooth)[0], both(*tensors, rough)[0])
        for config in (smooth, rough, None):
            for mine, eager in zip(compiled(*tensors, config), both(*tensors, config), strict=True):
                assert torch.equal(mine, eager)


@pytest.mark.parametrize("kernel", ["sage", "fav3_fp8"])
def test_report_75_new_lengths_recompile_at_most_once(kernel):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    with torch.no_grad():
        for seq in (40, 50, 33, 90):
            tensors = draw(Shape(1, 2, 2, seq, seq, 64), seed=seq)
            assert torch.equal(compiled(*tensors, kernel), block(*tensors, kernel))
    assert counter.frame_count <= 2


def test_report_75_dynamic_lengths_compile_in_the_first_call_alone():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    counts = set()
    with torch.no_grad():
        for seq_q, seq_k in ((40, 70), (50, 33), (64, 90)):
            tensors = draw(Shape(1, 2, 2, seq_q, seq_k, 64))
            assert torch.equal(compiled(*tensors, "sage"), block(*tensors, "sage"))
            counts.add(counter.frame_count)
    assert len(counts) == 1


def masked(q, k, v, mask, sinks, kernel):
    """A model with a mask that it expands, a window and sinks."""
    mask = mask[:, None, None, :].expand(-1, q.shape[1], q.shape[2], -1)
    return sage_plugin.attention(
        q, k, v, mask, kernel=kernel, is_causal=True, window=(30, -1), softcap=8.0, sinks=sinks
    )


@pytest.mark.parametrize(
    ("kernel", "kind"), [("sage", torch.bool), ("fav2", torch.float32), ("auto", torch.bool)]
)
def test_report_75_new_lengths_of_masked_calls_recompile_at_most_once(kernel, kind):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(masked, fullgraph=True, backend=counter)
    with torch.no_grad():
        for seq in (40, 50, 33, 90):
            q, k, v = draw(Shape(2, 4, 2, seq, seq, 64), seed=seq)
            mask = torch.randn(2, seq) + 1
            mask = mask > 0 if kind == torch.bool else mask
            given = (q, k, v, mask, torch.randn(4), kernel)
            assert torch.equal(compiled(*given), masked(*given))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("shape", [(50, 50), (2, 1, 1, 50), (2, 4, 50, 50)])
def test_report_73_masks_of_every_shape_compile_without_a_break(shape):
    q, k, v = draw(Shape(2, 4, 2, 50, 50, 80))
    mask = torch.rand(shape) > 0.3
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        out = compiled(q, k, v, "sage", attn_mask=mask)
        assert torch.equal(out, block(q, k, v, "sage", attn_mask=mask))


@pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no C++ compiler")
def test_the_default_compiler_agrees_with_eager():
    """Inductor holds every output to the strides that it was told of."""
    tensors = draw(Shape(1, 2, 2, 20, 20, 80))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    for kernel in ("sage", "torch"):
        compiled = torch.compile(block, fullgraph=True)
        with torch.no_grad():
            out = compiled(*turned, kernel)
            assert relative_l1(out, block(*turned, kernel)) < 1e-5


# -- gradients --------------------------------------------------------------------------------

NO_BACKWARD = "the ops of sage_plugin have no backward"


@BOTH
@pytest.mark.parametrize("kernel", ["sage", "torch"])
@pytest.mark.parametrize("which", [0, 1, 2, 3, 4])
def test_report_95_an_op_never_detaches_what_needs_a_gradient(op, kernel, which):
    given = list(arguments(kernel, mask=torch.randn(1, 1, 20, 33), sinks=torch.randn(4)))
    expected = outputs(op(*given))
    given[which] = given[which].detach().requires_grad_()
    with pytest.raises(UnsupportedInputError, match=NO_BACKWARD):
        op(*given)
    with torch.no_grad():
        for mine, plain in zip(outputs(op(*given)), expected, strict=True):
            assert torch.equal(mine, plain)
    with torch.inference_mode():
        op(*given)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_report_95_a_compiled_op_never_detaches_either(backend):
    given = arguments("sage")
    weight = torch.ones((), dtype=torch.bfloat16, requires_grad=True)

    def scaled(q, *rest):
        return ATTENTION(q * weight, *rest) * weight

    compiled = torch.compile(scaled, fullgraph=True, backend=backend)
    with pytest.raises(Exception, match=NO_BACKWARD):
        compiled(*given)

    def detached(q, *rest):
        with torch.no_grad():
            out = ATTENTION(q * weight, *rest)
        return out * weight

    torch._dynamo.reset()
    compiled = torch.compile(detached, fullgraph=True, backend=backend)
    compiled(*given).float().sum().backward()
    expected = ATTENTION(*given)
    torch.testing.assert_close(weight.grad.float(), expected.float().sum(), rtol=0.02, atol=1.0)


# -- the op by itself -------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", EMULATED)
def test_the_two_ops_agree(kernel):
    given = arguments(kernel)
    out, lse = WITH_LSE(*given)
    assert torch.equal(ATTENTION(*given), out)
    exact, exact_lse = WITH_LSE(*arguments("torch"))
    assert relative_l1(out.float(), exact.float()) < 2 * LIMITS[kernel] + 4e-3
    assert (lse - exact_lse).abs().max() < 0.1


def test_the_shape_record_of_a_call():
    q, k, v = draw(Shape(2, 4, 2, 20, 33, 80), torch.bfloat16, layout="bshd")
    shape = shape_of(q, k, v[..., :16], causal=True, scale=0.5, layout="bshd")
    assert shape == CallShape(2, 4, 2, 20, 33, 80, 16, "bfloat16", True, "none", "bshd", 0.5)
