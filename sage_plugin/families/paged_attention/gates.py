"""The accuracy limits of each kernel of paged attention.

They judge a kernel against exact attention on the very numbers of the cache: what storing keys and
values in 8 bits loses is no fault of a kernel. On drawn calls queries in INT8 cost a relative L1 of
0.005 and those in FP8 of 0.02; with channels of K that stick out, up to 0.03 and 0.04 in one head.
"""

from __future__ import annotations

import functools

from sage_plugin.accuracy.gate import Gate, gate_of

HOST = Gate(min_cosine=0.99998, min_row_cosine_p10=0.99997, max_worst_head_rel_l1=0.006)
QK_INT8 = Gate(min_cosine=0.9985, min_row_cosine_p10=0.997, max_worst_head_rel_l1=0.05)
QK_FP8 = Gate(min_cosine=0.995, min_row_cosine_p10=0.99, max_worst_head_rel_l1=0.1)
_GATES = {"sdpa": HOST, "fav2": HOST, "qk_int8": QK_INT8, "qk_fp8": QK_FP8}

gate_for = functools.partial(gate_of, _GATES)
"""Return the gate of a kernel."""
