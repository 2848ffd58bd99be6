"""A process without a GPU compiles what a call launches, and knows what it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")

CODE = textwrap.dedent("""
    import json
    from sage_plugin.kernels import absent_device
    from sage_plugin.families import ATTENTION
    from sage_plugin.kernels.attention import launch_space
    from sage_plugin.kernels.attention.dispatch import call_key
    from sage_plugin.kernels.contract import Decision
    from sage_plugin.schema import CallShape
    from tests.kernels.devices import facts
    import triton
    from triton import knobs

    where = facts("sm_80")
    absent_device.become(where)
    shape = CallShape(2, 4, 2, 4096, 4096, 64, 64, "float16", False, "none", "bshd", 0.125)
    decision = Decision("fav2", "portable")
    config = launch_space.default_launch(call_key(shape, decision), where)
    compiled = []
    knobs.compilation.listener = lambda **told: compiled.append(told["cache_hit"])
    (built,) = ATTENTION.compile_call(shape, decision, config, where)
    print(json.dumps([built.name, built.smem_bytes, built.registers, built.spill_bytes, compiled]))
""")


def test_a_call_is_compiled_once_and_kept_for_the_next_process(tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    answers = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True
        )
        answers.append(json.loads(done.stdout))
    (name, smem, registers, spills, hits), again = answers
    assert name == "plain_attention_kernel"
    assert 0 < smem < 163 * 2**10
    assert 32 < registers <= 255
    assert spills == 0
    assert (hits, again[4]) == ([False], [True])


LINEAR = textwrap.dedent("""
    from sage_plugin.families import LINEAR_FAMILY
    from sage_plugin.kernels import absent_device
    from sage_plugin.kernels.contract import Decision
    from sage_plugin.schema import LinearShape
    from scripts.aot_linears import facts_of

    where = facts_of("sm_80")
    absent_device.become(where)
    shape, decision = LinearShape(4096, 512, 512, "bfloat16"), Decision("int8_row", "triton")
    config = LINEAR_FAMILY.default_launch(LINEAR_FAMILY.call_key(shape, decision), where)
    built = LINEAR_FAMILY.compile_call(shape, decision, config, where)
    assert [one.name for one in built] == ["quantize_rows_kernel", "scaled_product_kernel"]
    assert all(0 < one.registers <= 255 and one.smem_bytes < 163 * 2**10 for one in built), built
    assert LINEAR_FAMILY.compile_call(shape, Decision("int8_row", "torch"), config, where) == ()
""")


def test_both_launches_of_a_linear_are_compiled_and_none_of_torch(tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", LINEAR], env=env, check=True)


PAGED = textwrap.dedent("""
    from sage_plugin.families import family
    from sage_plugin.kernels import absent_device
    from sage_plugin.kernels.contract import Decision
    from sage_plugin.paged_records import PagedShape
    from scripts.aot_linears import facts_of

    where, entry = facts_of("sm_90"), family("paged_attention")
    decision = Decision("fav2", "triton")
    absent_device.become(where)
    shape = PagedShape((1,) * 4, (4096,) * 4, 8, 2, 128, "bfloat16", "int8", 64, 4096)
    config = entry.default_launch(entry.call_key(shape, decision), where)
    built = entry.compile_call(shape, decision, config, where)
    assert [one.name for one in built] == ["paged_attention_kernel", "combine_kernel"]
    assert all(0 < one.registers <= 255 and one.spill_bytes == 0 for one in built), built
    assert entry.compile_call(shape, Decision("fav2", "emulation"), config, where) == ()
""")


def test_both_launches_of_paged_attention_are_compiled(tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PAGED], env=env, check=True)
