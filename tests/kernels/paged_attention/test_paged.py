"""`paged_attention` on a CPU: its emulation beside the definition, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

import sage_plugin
from sage_plugin.errors import UnknownKernelError, UnsupportedInputError
from tests.kernels.paged_attention.problems import (
    CASES,
    DECODE,
    RAGGED,
    ROWS,
    draw,
    error,
    tolerance,
)


@pytest.mark.usefixtures("nan_scratch")
@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_as_defined_with_poison_around(name: str, kernel: str) -> None:
    drawn = draw(ROWS[name])
    out, lse = sage_plugin.paged_attention(
        *drawn.args, **drawn.kwargs, kernel=kernel, return_lse=True
    )
    assert out.dtype == drawn.args[0].dtype
    assert error(out, drawn.out) < tolerance(ROWS[name], kernel)
    torch.testing.assert_close(
        lse.double(),
        drawn.lse,
        rtol=0,
        atol=1e-5 if kernel == "fav2" and not ROWS[name].cache else 0.1,
    )


@pytest.mark.parametrize("kernel", ["fav2", "qk_int8"])
def test_nan_reaches_the_rows_that_see_it_alone(kernel: str) -> None:
    problem = RAGGED if kernel == "fav2" else ROWS["int8"]
    drawn = draw(problem)
    q, k, v, table, *rest = drawn.args
    clean = sage_plugin.paged_attention(*drawn.args, **drawn.kwargs, kernel=kernel)
    kwargs = dict(drawn.kwargs)
    if kernel == "fav2":
        v = v.clone()
        v[int(table[0, 2]), 8] = math.nan  # key 40 of 42, seen by the last two rows of 21
        rows = slice(19, 21)
    else:
        kwargs["v_scale"] = kwargs["v_scale"].clone()
        kwargs["v_scale"][int(table[0, 2])] = math.nan  # keys from 32 on
        rows = slice(11, 21)
    out = sage_plugin.paged_attention(q, k, v, table, *rest, **kwargs, kernel=kernel)
    assert out[rows].isnan().all()
    keep = torch.ones(len(out), dtype=torch.bool)
    keep[rows] = False
    assert torch.equal(out[keep], clean[keep])


def _changed(**changes: object) -> dict[str, object]:
    drawn = draw(DECODE)
    names = ("q", "k_cache", "v_cache", "page_table", "kv_lens", "cu_q_lens")
    return dict(zip(names, drawn.args, strict=True)) | changes


WRONG = {
    "q is list": {"q": [1.0]},
    "do not fit together": {"q": torch.zeros(4, 4, 32)},
    "do not divide into": {"q": torch.zeros(4, 3, 64)},
    "0 query heads do not divide into 2": {"q": torch.zeros(4, 0, 64)},
    "scale is 'x'; it needs a finite number": {"scale": "x"},
    "page_table is torch.float32": {"page_table": torch.zeros(4, 5)},
    "for B sequences": {"kv_lens": torch.zeros(3, dtype=torch.int32)},
    "kv_lens is strided": {"kv_lens": torch.zeros(8, dtype=torch.int32)[::2]},
    "k_cache is torch.float16 and v_cache torch.float32": {
        "k_cache": torch.zeros(11, 16, 2, 64, dtype=torch.float16)
    },
    "q is torch.float64": {"q": torch.zeros(4, 4, 64, dtype=torch.float64)},
    "only 8-bit ones have scales": {"k_scale": torch.ones(11, 2)},
    "window is 3": {"window": 3},
    "softcap is -1": {"softcap": -1.0},
    "one logit a query head": {"sinks": torch.zeros(3)},
    "no backward": {"q": torch.zeros(4, 4, 64, requires_grad=True)},
    "it needs to rise from 0": {"cu_q_lens": torch.tensor([0, 3, 2, 4, 4], dtype=torch.int32)},
    "has place for 0 to": {"kv_lens": torch.tensor([1, 2, 3, 999], dtype=torch.int32)},
    "runs on a GPU": {"kernel": "fav2:triton"},
    "quantizes queries as the cache is": {"kernel": "qk_int8"},
}


@pytest.mark.parametrize("says", WRONG)
def test_one_sentence_for_what_does_not_fit(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedInputError, match=says):
        sage_plugin.paged_attention(**_changed(**WRONG[says]))


@pytest.mark.parametrize("cache", [torch.int8, torch.float8_e4m3fn])
def test_scales_are_checked(cache: torch.dtype) -> None:
    drawn = draw(DECODE.but(dtype=torch.bfloat16, cache=cache))
    with pytest.raises(UnsupportedInputError, match="one for each page and key head"):
        sage_plugin.paged_attention(*drawn.args, **drawn.kwargs | {"k_scale": torch.ones(2, 2)})
    if cache == torch.int8:
        with pytest.raises(UnsupportedInputError, match="v_scale is missing"):
            sage_plugin.paged_attention(*drawn.args, k_scale=drawn.kwargs["k_scale"])


@pytest.mark.parametrize("kernel", ["sage", "fav2:torch"])
def test_unknown_names(kernel: str) -> None:
    with pytest.raises(UnknownKernelError, match="choose one of auto"):
        sage_plugin.paged_attention(*draw(DECODE).args, kernel=kernel)
