"""How calls are recorded, one file for each op family."""

from __future__ import annotations

from sage_plugin.capture.ops.attention import AttentionOp
from sage_plugin.capture.ops.grouped_linear import GroupedLinearOp
from sage_plugin.capture.ops.linear import LinearOp
from sage_plugin.capture.ops.op import CapturedOp
from sage_plugin.capture.ops.paged_attention import PagedAttentionOp
from sage_plugin.paged_records import PAGED_ATTENTION
from sage_plugin.schema import ATTENTION, GROUPED_LINEAR, LINEAR

OPS: dict[str, CapturedOp] = {
    ATTENTION: AttentionOp(),
    LINEAR: LinearOp(),
    GROUPED_LINEAR: GroupedLinearOp(),
    PAGED_ATTENTION: PagedAttentionOp(),
}
