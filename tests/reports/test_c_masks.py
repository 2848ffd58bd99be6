"""Section C: masks of every form, honoured tile by tile, beside causality and grouped heads."""

from __future__ import annotations

import inspect

import pytest
import torch

import sage_plugin
from tests.kernels.calls import EMULATED, relative_l1
from tests.matrix.definition import definition

kernels = pytest.mark.parametrize("kernel", EMULATED)


def test_report_33_and_68_no_entrance_takes_names_that_it_does_not_know():
    names = ("attention", "attention_varlen", "prepare", "launch")
    for name in names:
        kinds = {p.kind for p in inspect.signature(getattr(sage_plugin, name)).parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    x = torch.ones(1, 1, 4, 32)
    with pytest.raises(TypeError, match="mask"):
        sage_plugin.attention(x, x, x, mask=torch.ones(4, 4).bool())


@pytest.mark.usefixtures("large_memory")
def test_report_42_the_host_never_holds_all_scores_of_grouped_heads(gpu):
    shape = (1, 32, 4096, 64)
    q = torch.randn(shape, device=gpu.device, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, 4096, 64, device=gpu.device).bfloat16() for _ in range(2))
    mask = torch.ones(1, 1, 4096, 4096, dtype=torch.bool, device=gpu.device).tril()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = sage_plugin.attention(q, k, v, mask, kernel="sdpa", enable_gqa=True)
    scores = 32 * 4096 * 4096 * q.element_size()
    assert torch.cuda.max_memory_allocated() - before < scores // 2
    expected = definition(q[:, :4, :100], k[:, :1], v[:, :1], mask[:, :, :100])[0]
    assert relative_l1(out[:, :4, :100], expected) < 0.01
