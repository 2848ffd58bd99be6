"""What `make test-fast` leaves out, by the beginning of its node id: measured, CPU seconds each.

A folder, a file or a test is here where it takes more than about three seconds on one core, or
where its many cases together take more than ten. `make test` prints the slowest tests of a run.
"""

from __future__ import annotations

SLOW = (
    # Pages, demo, examples and benchmarks: whole runs of a small model, 20 s a page at most.
    "tests/benchmarks/test_continuous_batching.py",
    "tests/benchmarks/test_paged_llm.py",
    "tests/benchmarks/test_step_times.py",
    "tests/cli/test_demo.py",
    "tests/cli/test_policy_prove.py::test_the_whole_path",
    "tests/cli/test_policy_sensitivity.py::test_it_is_measured",
    "tests/demo/test_pipeline.py",
    "tests/docs/test_families.py",
    "tests/docs/test_snippets.py",
    "tests/examples/",
    # Ahead-of-time compilers: 10 to 60 s a process.
    "tests/kernels/linear/test_aot.py",
    "tests/families/test_ahead_of_time.py",
    "tests/kernels/test_aot",
    # Triton's interpreter, 10 to 20 s each; the matrix has `INTERPRETED`.
    "tests/kernels/test_fallback.py",
    "tests/kernels/test_fused_prologue.py",
    "tests/kernels/test_prepass.py",
    "tests/kernels/test_launch_graph.py",
    "tests/kernels/paged_attention/test_triton.py",
    "tests/reports/",
    # The compiler of torch, and opcheck: 2 to 8 s a graph.
    "tests/kernels/linear/test_traced.py",
    "tests/kernels/paged_attention/test_ops.py",
    "tests/kernels/test_api.py::test_report_130",
    "tests/kernels/test_ops.py::test_report_73",
    "tests/kernels/test_ops.py::test_report_74_opcheck",
    "tests/kernels/test_ops.py::test_report_75",
    "tests/kernels/test_ops.py::test_the_default_compiler_agrees_with_eager",
    "tests/plugin/linears/test_compile.py",
    "tests/plugin/test_compile.py",
    "tests/plugin/test_invisible.py::test_report_127",
    "tests/plugin/test_names.py",
    "tests/plugin/test_policy.py::test_a_graph",
    "tests/plugin/test_policy.py::test_twelve_blocks",
    "tests/plugin/test_transformers.py::test_report_136",
    "tests/plugin/test_retarget.py::test_every_way_compiles",
    "tests/plugin/test_transformers.py::test_report_79",
    "tests/plugin/test_transformers.py::test_report_129",
    # Many models, processes or drawn runs: 3 to 20 s each.
    "tests/capture/test_recorder.py::test_a_killed_process",
    "tests/cli/test_tune.py",
    "tests/cli/test_root.py::test_a_closed_pipe_is_no_failed_gate_and_says_nothing[doctor",
    "tests/cli/test_root.py::test_a_full_standard_output_is_one_sentence[doctor",
    "tests/cli/test_tune_options.py::test_a_real_signal",
    "tests/faults/",
    "tests/kernels/test_two_step.py::test_q_k_and_v_are_free",
    "tests/packaging/test_archives.py",
    "tests/packaging/test_import.py",
    "tests/packaging/test_mutants.py::test_what_becomes_of_a_mutant",
    "tests/plugin/test_continuous_batching.py",
    "tests/plugin/test_families.py",
    "tests/plugin/prologue/test_families.py",
    "tests/plugin/prologue/test_quantized.py",
    "tests/plugin/test_owners.py",
    "tests/plugin/test_parallel.py",
    "tests/plugin/test_retarget.py::test_every_processor_of_diffusers_can_be_redirected",
    "tests/plugin/test_upstream.py",
    "tests/registry/test_lookup.py::test_the_key_is_the_same_in_every_interpreter",
    "tests/tune/policy/test_search.py",
    "tests/tune/test_compile_pool.py::test_each_config",
    "tests/tune/test_promote.py::test_the_winner_of_many",
    "tests/tune/test_ray_lanes.py",
    "tests/tune/test_simulate.py",
    "tests/tune/test_subprocess_runner.py",
    "tests/tune/test_session.py",
    "tests/tune/test_session_ends.py",
    "tests/tune/test_trial.py",
    "tests/tune/test_worker.py",
)

INTERPRETED = "-interpreter]"
"""How the ids of the matrix end in Triton's interpreter."""


SWEPT = (
    # Whole runs and builds of which `make test` has another one.
    "tests/benchmarks/test_step_times.py::test_report_77",
    "tests/benchmarks/test_parallel_programs.py::test_two_processes",
    "tests/capture/test_recorder.py::test_a_killed_process",
    "tests/capture/test_recorder.py::test_compiled_models",
    "tests/cli/test_demo.py::test_a_policy_takes",
    "tests/cli/test_policy_prove.py::test_the_whole_path",
    "tests/cli/test_policy_sensitivity.py::test_it_is_measured",
    "tests/cli/test_root.py::test_a_closed_pipe_is_no_failed_gate_and_says_nothing[doctor",
    "tests/cli/test_root.py::test_a_full_standard_output_is_one_sentence[doctor",
    "tests/cli/test_tune_options.py::test_a_real_signal_ends_the_children_and_names_the_command_that_goes_on[2]",
    "tests/docs/test_families.py::test_a_row_made_again_is_the_row_of_the_page[diffusers-",
    "tests/docs/test_families.py::test_a_row_made_again_is_the_row_of_the_page[transformers-t5",
    "tests/demo/test_pipeline.py::test_generated_digits_can_be_read",
    "tests/examples/test_compare.py::test_a_pipeline_that_tells_no_latents",
    "tests/families/test_ahead_of_time.py::test_both_launches",
    "tests/kernels/linear/test_aot.py::test_no_fp8",
    "tests/kernels/test_aot.py::test_every_form_of_a_call_compiles[sm_80",
    "tests/kernels/test_aot.py::test_no_fp8",
    "tests/kernels/test_aot.py::test_they_compile_without_queries",
    "tests/kernels/test_aot_hopper.py::test_a_block_that_overlaps_the_next_builds",
    "tests/kernels/test_aot_hopper.py::test_every_field_of_a_config_builds[fav3_sage-{'exp_lin",
    "tests/kernels/test_aot_hopper.py::test_programs_that_share_their_last_tiles_build",
    "tests/kernels/test_fused_prologue.py::test_operands_are_those_of_two_passes[fav3_sage",
    "tests/kernels/test_two_step.py::test_q_k_and_v_are_free_after_the_first_step[all-",
    "tests/kernels/test_two_step.py::test_q_k_and_v_are_free_after_the_first_step[causal-",
    "tests/plugin/linears/test_compile.py::test_a_patched_model_is_one_graph_for_all_steps[cogx",
    "tests/plugin/linears/test_compile.py::test_lengths_may_be_dynamic",
    "tests/plugin/prologue/test_quantized.py::test_the_first_call_is_two_passes_and_all_others_one[cogx",
    "tests/plugin/prologue/test_quantized.py::test_the_first_call_is_two_passes_and_all_others_one[flux",
    "tests/plugin/test_continuous_batching.py::test_caches_of_8_bits_tell_nearly_the_same[24-int8-auto",
    "tests/plugin/test_continuous_batching.py::test_caches_of_8_bits_tell_nearly_the_same[64-",
    "tests/plugin/test_names.py::test_a_language_model_compiles",
    "tests/plugin/test_policy.py::test_a_graph_outlives",
    "tests/plugin/test_refresh.py::test_report_103_refresh_mends",
    "tests/tune/test_simulate.py::test_noise_leads",
)
"""How the ids of tests begin that `make test-slow` runs and `make test` does not."""


def is_swept(node_id: str) -> bool:
    """Whether `make test` leaves a test to `make test-slow`."""
    return node_id.startswith(SWEPT)


def is_slow(node_id: str) -> bool:
    """Return whether `make test-fast` leaves a test out."""
    return node_id.startswith(SLOW) or node_id.endswith(INTERPRETED)
