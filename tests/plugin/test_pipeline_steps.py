"""Steps of a policy in pipelines of diffusers: whatever runs the model, and how many steps."""

from __future__ import annotations

import copy
import threading

import pytest
import torch

pytest.importorskip("diffusers")

import diffusers

import sage_plugin
from sage_plugin.kernels.fallback import Fallback, FallbackReason
from sage_plugin.plugin.policy.rules import PRESETS, Policy, Rule
from tests.plugin.tiny import vae

FIRST = Policy(1, (Rule("sage", steps=":1"), Rule("sdpa")))
LAST_TWO = Policy(1, (Rule("sdpa", steps="-2:"), Rule("sage")))
WORDS = torch.randn(1, 8, 16)


def unet():
    return diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
        norm_num_groups=8,
    )  # fmt: skip


def image_to_image(scheduler=None):
    pipe = diffusers.StableDiffusionImg2ImgPipeline(
        vae(), None, None, unet(), scheduler or diffusers.DDIMScheduler(), None, None,
        requires_safety_checker=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def change(pipe, strength, steps=10):
    pipe(
        prompt_embeds=WORDS, negative_prompt_embeds=0 * WORDS, image=torch.rand(1, 3, 8, 8),
        strength=strength, num_inference_steps=steps, output_type="latent",
    )  # fmt: skip


def classes():
    """A pipeline of one transformer, drawn from with `draw`."""
    pipe = diffusers.DiTPipeline(
        diffusers.DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, num_layers=1, sample_size=8,
            in_channels=4, out_channels=8, num_embeds_ada_norm=1000,
        ),
        vae(),
        diffusers.DDIMScheduler(),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, steps=4):
    pipe.set_progress_bar_config(disable=True)
    pipe([1], num_inference_steps=steps, output_type="latent")


def request_of(pipe):
    request = copy.copy(pipe)
    request.scheduler = copy.deepcopy(pipe.scheduler)
    return request


RUNS = {
    "the pipeline itself": lambda pipe: pipe,
    "a request's own copy": request_of,
    "its parts and a new scheduler": lambda pipe: diffusers.DiTPipeline(
        **{**pipe.components, "scheduler": diffusers.DDIMScheduler()}
    ),
    "its parts": lambda pipe: diffusers.DiTPipeline(**pipe.components),
}


@pytest.mark.parametrize("made", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("gone", [False, True])
def test_report_400_steps_are_those_of_the_object_that_runs_the_model(made, gone):
    pipe = classes()
    handle = sage_plugin.patch(pipe, policy=FIRST, min_seq=0)
    runner = made(pipe)
    if gone:
        del pipe
    for _ in range(2):
        draw(runner)
    (row,) = handle.report().rows
    assert row.rule_steps == {1: (0,), 2: (1, 2, 3)}
    assert row.rules == {1: 2, 2: 6}
    handle.unpatch()
    assert type(runner.scheduler) is diffusers.DDIMScheduler


@pytest.mark.parametrize(
    ("strength", "scheduler", "options"),
    [
        (1.0, "DDIMScheduler", {}),
        (0.5, "DDIMScheduler", {}),
        (0.5, "EulerDiscreteScheduler", {}),
        (0.5, "HeunDiscreteScheduler", {}),
        (0.7, "PNDMScheduler", {"skip_prk_steps": True}),
    ],
)
def test_report_404_the_last_steps_of_image_to_image_are_the_last(strength, scheduler, options):
    pipe = image_to_image(getattr(diffusers, scheduler)(**options))
    with sage_plugin.patched(pipe, policy=LAST_TWO, min_seq=0) as handle:
        change(pipe, strength)
    report, count = handle.report(), pipe.num_timesteps
    assert count >= int(10 * strength)
    assert report.rows[0].rule_steps == {2: tuple(range(count - 2)), 1: (count - 2, count - 1)}
    assert (report.idle_rules, report.steps) == ((), count)


def test_report_404_the_exact_last_tenth_of_balanced_comes_under_strength_one_half():
    pipe = image_to_image()
    rules = tuple(
        Rule(rule.kernel if rule.kernel != "auto" else "fav2", steps=rule.steps)
        for rule in PRESETS["balanced"]
    )
    with sage_plugin.patched(pipe, policy=Policy(1, rules), min_seq=0) as handle:
        change(pipe, 0.5, steps=40)
    steps = handle.report().rows[0].rule_steps
    assert steps == {1: (0, 1), 3: tuple(range(2, 18)), 2: (18, 19)}


def sdxl(kind="StableDiffusionXLPipeline"):
    net = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
        norm_num_groups=8, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=64,
    )  # fmt: skip
    pipe = getattr(diffusers, kind)(
        vae(), None, None, None, None, net, diffusers.EulerDiscreteScheduler(),
        add_watermarker=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_report_404_denoising_end_ends_the_run():
    pipe, pooled = sdxl(), torch.randn(1, 16)
    with sage_plugin.patched(pipe, policy=LAST_TWO, min_seq=0) as handle:
        pipe(
            prompt_embeds=WORDS, negative_prompt_embeds=0 * WORDS, pooled_prompt_embeds=pooled,
            negative_pooled_prompt_embeds=pooled, num_inference_steps=10, denoising_end=0.8,
            output_type="latent", height=8, width=8,
        )  # fmt: skip
    steps = handle.report().rows[0].rule_steps
    count = pipe.num_timesteps
    assert count < 10
    assert steps == {2: tuple(range(count - 2)), 1: (count - 2, count - 1)}


def test_report_402_requests_in_threads_have_their_own_steps():
    pipe = classes()
    with sage_plugin.patched(pipe, policy=FIRST, min_seq=0) as handle:
        requests = [request_of(pipe) for _ in range(3)]
        threads = [threading.Thread(target=draw, args=(r, 4 + n)) for n, r in enumerate(requests)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (row,) = handle.report().rows
    assert row.rule_steps == {1: (0,), 2: (1, 2, 3, 4, 5)}
    assert row.fallbacks.keys() == {FallbackReason(Fallback.POLICY, 2)}
    assert [type(r.scheduler) for r in requests] == [diffusers.DDIMScheduler] * 3


def test_report_403_prior_and_decoder_of_a_combined_pipeline_have_their_own_steps():
    prior = diffusers.PriorTransformer(
        num_attention_heads=2, attention_head_dim=8, num_layers=1, embedding_dim=16,
        num_embeddings=4, additional_embeddings=4,
    )  # fmt: skip
    net = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=8, block_out_channels=(16, 32),
        layers_per_block=1, down_block_types=("ResnetDownsampleBlock2D",
        "SimpleCrossAttnDownBlock2D"), up_block_types=("SimpleCrossAttnUpBlock2D",
        "ResnetUpsampleBlock2D"), mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        attention_head_dim=8, norm_num_groups=8, cross_attention_dim=16,
        encoder_hid_dim=16, encoder_hid_dim_type="image_proj", addition_embed_type="image",
        class_embed_type=None,
    )  # fmt: skip
    schedulers = (
        diffusers.UnCLIPScheduler(prediction_type="sample", num_train_timesteps=100),
        (diffusers.DDPMScheduler()),
    )
    combined = diffusers.KandinskyV22CombinedPipeline(
        net, schedulers[1], vae(), prior, None, None, None, schedulers[0], None
    )
    names = set(sage_plugin.patch(combined, policy=LAST_TWO, min_seq=0).components)
    assert names == {"prior_prior", "unet"}
    combined.prior_pipe.set_progress_bar_config(disable=True)
    combined.decoder_pipe.set_progress_bar_config(disable=True)
    embeds = torch.randn(1, 16)
    seen = {}

    def prior_run(pipe):
        pipe._encode_prompt = lambda *a, **k: (
            embeds.repeat(2, 1), torch.randn(2, 4, 16), torch.ones(2, 4, dtype=torch.bool)
        )  # fmt: skip
        pipe.get_zero_embed = lambda *a, **k: embeds
        return pipe("a", num_inference_steps=4, output_type="pt")

    try:
        prior_run(combined.prior_pipe)
        combined.decoder_pipe(
            embeds, embeds, height=64, width=64, num_inference_steps=6, output_type="latent"
        )
    finally:
        for row in sage_plugin.report(combined).rows:
            seen[row.layer.split(".")[0]] = row.rule_steps
        sage_plugin.unpatch(combined)
    assert seen == {"prior_prior": {2: (0, 1), 1: (2, 3)}, "unet": {2: (0, 1, 2, 3), 1: (4, 5)}}


def test_report_405_a_loop_whose_scheduler_does_not_step_is_left_to_the_baseline():
    """As inversions that compute their own update."""
    pipe = classes()
    handle = sage_plugin.patch(pipe, policy=FIRST, min_seq=0)

    class Inversion(diffusers.DiTPipeline):
        @torch.no_grad()
        def invert(self):
            self.scheduler.set_timesteps(4)
            for t in self.scheduler.timesteps:
                self.transformer(torch.randn(1, 4, 8, 8), t[None], class_labels=torch.tensor([1]))

    Inversion(**pipe.components).invert()
    (row,) = handle.report().rows
    assert row.rule_steps == {1: (0,)}
    assert row.fallbacks == {FallbackReason(Fallback.STEP_STANDS_STILL): 3}
    draw(pipe)
    assert handle.report().rows[0].rule_steps == {1: (0,), 2: (1, 2, 3)}
    handle.unpatch()


def test_a_forward_that_fails_leaves_no_step_behind(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("stop")

    pipe = classes()
    handle = sage_plugin.patch(pipe, policy=FIRST, min_seq=0)
    tracker = next(iter(handle.layers.values())).state.tracker
    monkeypatch.setattr(pipe.transformer.transformer_blocks[0], "forward", fail)
    with pytest.raises(RuntimeError, match="stop"):
        draw(pipe)
    assert tracker.passed == 1
    assert tracker.now(pipe.transformer) is Fallback.STEP_WITHOUT_SCHEDULER
    handle.unpatch()
