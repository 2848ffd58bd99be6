"""Attention's entry."""

from __future__ import annotations

from sage_plugin.families.attention import ahead_of_time, cost, gates, labels, replay
from sage_plugin.families.family import Family
from sage_plugin.kernels import launch_config
from sage_plugin.kernels.attention import dispatch, launch_space
from sage_plugin.schema import ATTENTION as NAME

ATTENTION = Family(
    name=NAME,
    parse_kernel=dispatch.parse_kernel,
    kernels_of=dispatch.kernels_of,
    automatic_kernel=dispatch.automatic_kernel,
    decide=dispatch.decide,
    call_key=dispatch.call_key,
    default_launch=launch_space.default_launch,
    search_space=launch_space.search_space,
    illegal_reason=launch_space.illegal_reason,
    find_launch=launch_space.find_launch,
    forget=launch_config.forget,
    compile_call=ahead_of_time.compile_call,
    gate_for=gates.gate_for,
    captured=replay.captured,
    drawn=replay.drawn,
    saved_shape=replay.saved_shape,
    describe=labels.describe,
    flops=cost.flops,
)
