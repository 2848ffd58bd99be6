"""The torch op of paged attention: fakes, one graph, no look at its integers while it traces."""

from __future__ import annotations

import pytest
import torch

import sage_plugin
from sage_plugin.kernels.paged_attention import torch_ops  # noqa: F401  (registers the ops)
from tests.kernels.paged_attention.problems import RAGGED, ROWS, draw


@pytest.mark.parametrize("name", ["sinks", "int8"])
@pytest.mark.parametrize("lse", [False, True])
def test_the_fake_is_as_the_op(name: str, lse: bool) -> None:
    drawn = draw(ROWS[name])
    rest = (drawn.kwargs.get(n) for n in ("sinks", "k_scale", "v_scale"))
    op = getattr(torch.ops.sage_plugin, f"paged_attention{'_with_lse' if lse else ''}")
    torch.library.opcheck(
        op, (*drawn.args, *rest, None, True, None, 0.0, "auto"),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_one_graph_serves_other_lengths() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    def model(*args: torch.Tensor) -> torch.Tensor:
        return sage_plugin.paged_attention(*args, window=(9, 0)) * 2

    compiled = torch.compile(model, backend=count, fullgraph=True)
    first = [x.nan_to_num() for x in draw(RAGGED).args]
    torch.testing.assert_close(compiled(*first), model(*first))
    other = list(first)
    other[4], other[5] = first[4].flip(0), torch.tensor([0, 1, 9, 9, 31], dtype=torch.int32)
    torch.testing.assert_close(compiled(*other), model(*other))
    assert len(graphs) == 1


def test_inference_mode_and_subclasses_go_through_the_op() -> None:
    args = draw(RAGGED).args
    out = sage_plugin.paged_attention(*args)
    with torch.inference_mode():
        assert torch.equal(sage_plugin.paged_attention(*args), out)
    meta = [x.to("meta") for x in args]
    assert sage_plugin.paged_attention(*meta).shape == out.shape
