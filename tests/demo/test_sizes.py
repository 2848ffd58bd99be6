"""The demo's geometries: token counts and the look-up by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sage_plugin.demo.sizes import SIZES, find_size
from sage_plugin.errors import DemoError


@pytest.mark.parametrize(
    ("name", "clip", "video_tokens", "tokens"),
    [
        ("small", (16, 48, 48), 2304, 2312),
        ("large", (32, 96, 96), 18432, 18440),
    ],
)
def test_token_counts(
    name: str, clip: tuple[int, int, int], video_tokens: int, tokens: int
) -> None:
    size = find_size(name)
    assert (size.frames, size.height, size.width) == clip
    assert size.video_tokens == video_tokens
    assert size.tokens == tokens
    assert size.default_steps == 15


def test_large_is_the_same_scene_at_twice_the_resolution() -> None:
    small, large = SIZES["small"], SIZES["large"]
    assert large.scale == 2 * small.scale == 2
    assert large.digit_px / large.height == small.digit_px / small.height


def test_a_geometry_is_passed_through() -> None:
    short = replace(SIZES["small"], frames=2)
    assert find_size(short) is short
    assert short.tokens == 8 + 2 * 144


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DemoError, match=r"'huge'.*small, large"):
        find_size("huge")
