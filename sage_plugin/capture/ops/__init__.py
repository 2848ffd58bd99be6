"""How calls are recorded, one file for each op family."""

from __future__ import annotations

from sage_plugin.capture.ops.attention import AttentionOp
from sage_plugin.capture.ops.linear import LinearOp
from sage_plugin.capture.ops.op import CapturedOp
from sage_plugin.schema import ATTENTION, LINEAR

OPS: dict[str, CapturedOp] = {ATTENTION: AttentionOp(), LINEAR: LinearOp()}
