"""Train the embedded demo model (`sage_plugin.demo`) on one GPU in under ten minutes.

    python scripts/train_demo.py --output sage_plugin/demo/weights --samples samples
    python scripts/train_demo.py --smoke --output out --samples out    # CPU, 20 s

Flow matching in pixels: `x_t = (1 - t) * x_0 + t * noise`, the model sees `1000 * t` and predicts
the velocity `noise - x_0`. Weights and their average are float32; a bf16 copy does forward and
backward. The curriculum goes from short and small clips to long and large ones; every step adds up
the gradients of all geometries of its stage, so that nothing is forgotten.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import platform
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import demo_digits as digits
import diffusers
import numpy as np
import torch

from sage_plugin.demo.film import save_clips
from sage_plugin.demo.model import (
    TRAINING_FILE,
    DemoModel,
    build_model,
    rotary_embedding,
    save_model,
)
from sage_plugin.demo.pipeline import DigitVideoPipeline, load_pipeline
from sage_plugin.demo.sizes import SIZES, DemoSize

logger = logging.getLogger("train_demo")

SMALL, LARGE = SIZES["small"], SIZES["large"]
CLIP4 = replace(LARGE, name="large_4_frames", frames=4, shift=5.0)  # as many tokens as SMALL
CLIP12 = replace(LARGE, name="large_12_frames", frames=12, shift=6.5)
LONG = replace(SMALL, name="small_32_frames", frames=32, shift=5.0)


@dataclass(frozen=True, slots=True)
class Stage:
    """From `start` (share of the time budget) on, a step trains these (geometry, clips)."""

    start: float
    batches: tuple[tuple[DemoSize, int], ...]


STAGES = (
    Stage(0.00, ((SMALL, 24), (CLIP4, 8))),
    Stage(0.45, ((SMALL, 12), (CLIP4, 8), (CLIP12, 3), (LONG, 3))),
    Stage(0.62, ((SMALL, 8), (CLIP4, 4), (CLIP12, 2), (LARGE, 3))),
)
_TINY = DemoSize("small", frames=2, height=48, width=48, digit_px=28, shift=4.0)
SMOKE_STAGES = (
    Stage(0.0, ((_TINY, 4),)),
    Stage(0.5, ((_TINY, 2), (replace(CLIP4, frames=1), 1))),
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the result, apart from the machine."""

    minutes: float = 7.0
    seed: int = 2024
    peak_lr: float = 1.5e-3
    final_lr_share: float = 0.02
    warmup_steps: int = 300
    decay_from: float = 0.3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    label_dropout: float = 0.1
    ema_decay: float = 0.998
    log_every: int = 25
    checkpoint_seconds: float = 45.0
    stages: tuple[Stage, ...] = STAGES


@dataclass(slots=True)
class Progress:
    """What happened so far."""

    started: float = field(default_factory=time.monotonic)
    step: int = 0
    clips: dict[str, int] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)

    seconds: float = 0.0

    def tick(self) -> float:
        """Update and return the wall-clock seconds since the first step."""
        self.seconds = time.monotonic() - self.started
        return self.seconds


def init_weights(model: DemoModel) -> None:
    """Start as DiT does: each block is the identity and the output is zero."""
    for name, module in model.transformer.named_modules():
        if isinstance(module, torch.nn.Linear):
            if name == "proj_out" or (".norm" in f".{name}" and name.endswith("linear")):
                torch.nn.init.zeros_(module.weight)
            else:
                torch.nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                torch.nn.init.zeros_(module.bias)
    for table in (model.label_embedding.digits, model.label_embedding.scales):
        torch.nn.init.normal_(table.weight, std=0.5)


class Trainer:
    """Float32 weights, their average, and the low-precision copy that computes gradients."""

    def __init__(self, recipe: Recipe, source: digits.BouncingDigits, device: torch.device) -> None:
        """Build the model on `device`; everything random follows `recipe.seed`."""
        self.recipe, self.source, self.device = recipe, source, device
        self.generator = torch.Generator(device).manual_seed(recipe.seed)
        self.model = build_model()
        init_weights(self.model)
        self.model.modules().to(device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.worker = copy.deepcopy(self.model)
        self.worker.modules().to(dtype)
        self.average = copy.deepcopy(self.model)
        self.weights = list(self.model.modules().parameters())
        self.worker_weights = list(self.worker.modules().parameters())
        self.average_weights = list(self.average.modules().parameters())
        self.optimizer = torch.optim.AdamW(
            self.weights,
            lr=recipe.peak_lr,
            betas=recipe.betas,
            weight_decay=recipe.weight_decay,
            fused=device.type == "cuda",
        )
        self.rotary: dict[DemoSize, tuple[torch.Tensor, torch.Tensor]] = {}

    def loss(self, size: DemoSize, batch: int) -> torch.Tensor:
        """Mean squared velocity error of one fresh batch of clips."""
        clips = self.source.sample(size, batch, generator=self.generator)
        clean, labels = clips.frames, clips.labels
        coin = torch.rand(batch, generator=self.generator, device=self.device)
        empty = self.worker.label_embedding.empty_label
        labels = torch.where(coin < self.recipe.label_dropout, empty, labels)
        noise = torch.empty_like(clean).normal_(generator=self.generator)
        # One uniform draw split into `batch` strata: less variance than independent draws.
        offset = torch.rand(1, generator=self.generator, device=self.device)
        t = (torch.arange(batch, device=self.device) + offset) / batch
        t = size.shift * t / (1 + (size.shift - 1) * t)
        mix = t.view(-1, 1, 1, 1, 1)
        if size not in self.rotary:
            head_dim = self.worker.transformer.config.attention_head_dim
            self.rotary[size] = rotary_embedding(size, head_dim, self.device)
        dtype = self.worker_weights[0].dtype
        velocity = self.worker.transformer(
            hidden_states=((1 - mix) * clean + mix * noise).to(dtype),
            encoder_hidden_states=self.worker.label_embedding(labels, size),
            timestep=t * 1000,
            image_rotary_emb=self.rotary[size],
            return_dict=False,
        )[0]
        return (velocity.float() - (noise - clean)).square().mean()

    def step(
        self, batches: tuple[tuple[DemoSize, int], ...], lr: float, count: int
    ) -> list[torch.Tensor]:
        """One optimiser step over all `batches`; returns each batch's loss."""
        losses = []
        for size, batch in batches:
            loss = self.loss(size, batch)
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        for weight, worker in zip(self.weights, self.worker_weights, strict=True):
            weight.grad = None if worker.grad is None else worker.grad.float()
            worker.grad = None
        torch.nn.utils.clip_grad_norm_(self.weights, self.recipe.grad_clip)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        decay = min(self.recipe.ema_decay, (1 + count) / (10 + count))
        with torch.no_grad():
            torch._foreach_lerp_(self.average_weights, self.weights, 1 - decay)
            torch._foreach_copy_(self.worker_weights, self.weights)
        return losses


def learning_rate(recipe: Recipe, step: int, share: float) -> float:
    """Linear warm-up by steps, then a cosine fall by share of the time budget."""
    warm = min(1.0, (step + 1) / recipe.warmup_steps)
    fall = min(1.0, max(0.0, (share - recipe.decay_from) / (1 - recipe.decay_from)))
    cosine = 0.5 * (1 + math.cos(math.pi * fall))
    return recipe.peak_lr * warm * (recipe.final_lr_share + (1 - recipe.final_lr_share) * cosine)


def train(trainer: Trainer, output: Path) -> Progress:
    """Train until the time is spent; write the average weights now and then, and at the end."""
    recipe, progress = trainer.recipe, Progress()
    budget, saved = recipe.minutes * 60, 0.0
    while (elapsed := progress.tick()) < budget:
        share = elapsed / budget
        stage = [stage for stage in recipe.stages if share >= stage.start][-1]
        lr = learning_rate(recipe, progress.step, share)
        losses = trainer.step(stage.batches, lr, progress.step)
        for size, batch in stage.batches:
            progress.clips[size.name] = progress.clips.get(size.name, 0) + batch
        if progress.step % recipe.log_every == 0:
            log_losses(progress, stage, [float(loss) for loss in losses], lr)
            if elapsed - saved > recipe.checkpoint_seconds:
                save_model(trainer.average, output)
                write_record(output, recipe, progress, trainer.device, status="partial")
                saved = elapsed
        progress.step += 1
    save_model(trainer.average, output)
    write_record(output, recipe, progress, trainer.device, status="trained")
    return progress


def log_losses(progress: Progress, stage: Stage, losses: list[float], lr: float) -> None:
    """Log one line, keep it for the record, and stop a run that has diverged."""
    named = {
        size.name: round(loss, 5) for (size, _), loss in zip(stage.batches, losses, strict=True)
    }
    seconds = round(progress.seconds, 1)
    progress.curve.append({"step": progress.step, "seconds": seconds, "loss": named})
    logger.info("step %d  %.0f s  lr %.1e  loss %s", progress.step, seconds, lr, named)
    if not all(math.isfinite(loss) for loss in losses):
        raise SystemExit(f"the loss is not finite at step {progress.step}: {named}; lower --lr")


def write_record(
    output: Path, recipe: Recipe, progress: Progress, device: torch.device, **extra: object
) -> None:
    """Write `training.json`: recipe, loss curve, machine and versions."""
    cuda = device.type == "cuda"
    record = {
        **extra,
        "seconds": round(progress.seconds, 1),
        "steps": progress.step,
        "clips": progress.clips,
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "CPU",
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "numpy": np.__version__,
        },
        "recipe": asdict(recipe),
        "loss_curve": progress.curve,
    }
    (output / TRAINING_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def render(
    pipe: DigitVideoPipeline, folder: Path, glyphs: digits.Glyphs, *, smoke: bool
) -> dict[str, Any]:
    """Save samples at several guidance scales and measure how many digits read back."""
    legibility: dict[str, Any] = {}
    tiny = _TINY if smoke else SMALL
    plan = [
        (tiny, 2 if smoke else 15, guidance, list(range(10)), 1 if smoke else 10)
        for guidance in (1.0, 1.5, 2.0, 3.0, 4.0)
    ]
    if not smoke:
        plan += [(SMALL, 30, 2.0, list(range(10)), 10)]
        plan += [(LARGE, 15, g, list(range(10)), 1) for g in (1.5, 2.0, 3.0)]
        plan += [(LARGE, 30, 2.0, list(range(10)), 1)]
    for size, steps, guidance, asked, repeats in plan:
        start = time.monotonic()
        generator = torch.Generator().manual_seed(0)
        frames = pipe(asked * repeats, size, steps, guidance, generator).frames
        seconds = time.monotonic() - start
        read = digits.read_digits(frames, size, glyphs)
        right = (read == torch.tensor(asked * repeats)).float().mean().item()
        name = f"{size.name}_steps{steps}_guidance{round(guidance * 10)}"
        legibility[name] = {"read_correctly": round(right, 3), "clips": len(read)}
        logger.info(
            "%s: %.0f%% of %d read correctly, %.2f s", name, right * 100, len(read), seconds
        )
        shown = frames[: len(asked)].permute(0, 1, 3, 4, 2).cpu().numpy()
        save_clips(dict(zip(map(str, asked), shown, strict=True)), folder / name)
    return legibility


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    recipe = Recipe()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, default=recipe.minutes, help="training time budget"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for weights and record")
    parser.add_argument(
        "--samples", type=Path, required=True, help="folder for contact sheets and GIFs"
    )
    parser.add_argument("--seed", type=int, default=recipe.seed)
    parser.add_argument("--lr", type=float, default=recipe.peak_lr, help="peak learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--smoke", action="store_true", help="prove every path in seconds, on any device"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Train, save, reload, render."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    recipe = Recipe(minutes=arguments.minutes, seed=arguments.seed, peak_lr=arguments.lr)
    if arguments.smoke:
        recipe = replace(
            recipe, minutes=0.1, log_every=1, checkpoint_seconds=2, stages=SMOKE_STAGES
        )
    torch.manual_seed(recipe.seed)
    device = torch.device(arguments.device)
    scans = digits.load_glyphs()
    source = digits.BouncingDigits(digits.most_legible(scans).to(device))
    trainer = Trainer(recipe, source, device)
    count = sum(weight.numel() for weight in trainer.weights)
    logger.info("%.2f M parameters, %d glyphs", count / 1e6, len(source.glyphs.labels))

    progress = train(trainer, arguments.output)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    pipe = load_pipeline(folder=arguments.output, device=device, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    legibility = render(pipe, arguments.samples, scans, smoke=arguments.smoke)
    write_record(
        arguments.output, recipe, progress, device, status="complete", legibility=legibility
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
