"""The bouncing digits: motion, drawing and the choice of scans."""

from __future__ import annotations

import pytest
import torch

from sage_plugin.demo.sizes import SIZES, DemoSize
from tests.script import loaded

pytest.importorskip("sklearn")

digits = loaded("demo_digits")


@pytest.fixture(scope="module")
def glyphs() -> digits.Glyphs:
    return digits.load_glyphs()


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest) -> DemoSize:
    return SIZES[request.param]


def test_scans_are_all_there(glyphs: digits.Glyphs) -> None:
    assert glyphs.fields.shape == (1797, 72, 72)
    assert glyphs.labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_bounce_follows_a_hand_computed_path() -> None:
    start = torch.tensor([[0.0, 15.0]])  # y moves away from 0; x is on its way back, at 20 - 15 = 5
    path = digits.bounce(start, torch.tensor([[4.0, 3.0]]), 5, room=10.0)
    assert path[0, :, 0].tolist() == [0, 4, 8, 8, 4]
    assert path[0, :, 1].tolist() == [5, 2, 1, 4, 7]


def test_box_stays_inside_and_speed_is_constant(glyphs: digits.Glyphs, size: DemoSize) -> None:
    clips = digits.BouncingDigits(glyphs).sample(
        size, 12, generator=torch.Generator().manual_seed(3)
    )
    room = size.height - size.digit_px
    assert clips.corners.min() >= 0
    assert clips.corners.max() <= room
    moved = clips.corners.diff(dim=1).abs()  # (B, F - 1, 2)
    fastest = moved.amax(1)  # the axis speeds: every step that meets no wall moves by exactly this
    turned = moved < fastest[:, None] - 1e-3
    assert (moved[~turned] > 0).all()
    speed = fastest.norm(dim=-1)
    low, high = (value * size.scale for value in digits.SPEED_PX)
    assert ((speed >= low - 1e-3) & (speed <= high + 1e-3)).all()
    # A step is shorter only where the box touches a wall within that step.
    before = clips.corners[:, :-1]
    to_wall = torch.minimum(before, room - before)
    assert (to_wall[turned] <= fastest[:, None].expand_as(moved)[turned] + 1e-3).all()
    assert turned.any()


def test_ink_moves_with_the_box(glyphs: digits.Glyphs, size: DemoSize) -> None:
    clips = digits.BouncingDigits(glyphs).sample(
        size, 4, generator=torch.Generator().manual_seed(5)
    )
    ink = clips.frames[:, :, 0] / 2 + 0.5
    assert ink.min() >= 0
    assert ink.max() == 1
    assert 0.03 < ink.mean() < 0.25
    rows = torch.arange(size.height) + 0.5
    center = (ink.sum(-1) @ rows) / ink.sum((-1, -2))  # (B, F)
    offset = center - clips.corners[..., 0]
    assert (offset - offset[:, :1]).abs().max() < 0.05 * size.digit_px / 28


def test_no_ink_touches_the_edge_of_the_box() -> None:
    full = digits.glyphs_from_scans(torch.full((1, 8, 8), 16.0), torch.zeros(1))
    frame = digits.draw(full.fields, torch.tensor([[[10.0, 10.0]]]), SIZES["small"])[0, 0, 0]
    inked = (frame > -1).nonzero()
    assert inked.min() >= 10
    assert inked.max() < 38


def test_same_seed_same_clips(glyphs: digits.Glyphs) -> None:
    source = digits.BouncingDigits(glyphs)
    first, second, third = (
        source.sample(SIZES["small"], 2, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first.frames, second.frames)
    assert not torch.equal(first.frames, third.frames)


def test_most_legible_keeps_part_of_every_digit(glyphs: digits.Glyphs) -> None:
    kept = digits.most_legible(glyphs, thin=0.5, typical=0.5)
    share = kept.labels.bincount() / glyphs.labels.bincount()
    assert ((share > 0.24) & (share < 0.26)).all()
    assert kept.fields.mean() < glyphs.fields.mean()


def test_true_clips_read_back(glyphs: digits.Glyphs, size: DemoSize) -> None:
    clips = digits.BouncingDigits(glyphs).sample(
        size, 10, generator=torch.Generator().manual_seed(7)
    )
    read = digits.read_digits(clips.frames[:, ::8] / 2 + 0.5, size, glyphs)
    assert torch.equal(read, clips.labels)


def test_noise_does_not_read_as_what_was_asked(glyphs: digits.Glyphs) -> None:
    frames = torch.rand(20, 1, 1, 48, 48, generator=torch.Generator().manual_seed(0))
    read = digits.read_digits(frames, SIZES["small"], glyphs)
    assert (read == torch.arange(20) % 10).float().mean() <= 0.3
