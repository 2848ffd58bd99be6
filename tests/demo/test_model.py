"""The demo model's files: what ships, and what a damaged copy says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

from sage_plugin.demo.model import (
    build_model,
    load_model,
    read_config,
    rotary_embedding,
    save_model,
    shipped_folder,
)
from sage_plugin.demo.sizes import SIZES
from sage_plugin.errors import DemoError

WEIGHTS = shipped_folder() / "model.safetensors"
needs_weights = pytest.mark.skipif(not WEIGHTS.exists(), reason="the weights are not trained yet")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(build_model(), tmp_path)
    return tmp_path


def test_parameter_count_and_size() -> None:
    model = build_model()
    count = sum(weight.numel() for weight in model.modules().parameters())
    assert 4.8e6 < count < 5.0e6
    assert type(model.transformer).__name__ == "CogVideoXTransformer3DModel"
    processors = {type(p).__name__ for p in model.transformer.attn_processors.values()}
    assert processors == {"CogVideoXAttnProcessor2_0"}


def test_save_and_load_agree(folder: Path) -> None:
    torch.manual_seed(1)
    model = build_model()
    save_model(model, folder)
    loaded = load_model(folder=folder, dtype=torch.float16)
    for name, tensor in loaded.modules().state_dict().items():
        assert torch.equal(tensor, model.modules().state_dict()[name].half()), name
    assert not any(weight.requires_grad for weight in loaded.modules().parameters())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(DemoError, match="are missing; reinstall"):
        load_model(folder=folder)


@pytest.mark.parametrize("damage", ["truncated", "foreign", "other_shape"])
def test_damaged_weights_give_one_sentence(folder: Path, damage: str) -> None:
    path = folder / "model.safetensors"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:100_000])
    elif damage == "foreign":
        path.write_text("<html>not found</html>")
    else:
        config = read_config(folder)
        config["transformer"]["num_layers"] = 3
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DemoError, match="are damaged") as caught:
        load_model(folder=folder)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 400


def test_damaged_settings(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(DemoError, match=r"cannot read the demo model's settings"):
        read_config(folder)
    (folder / "config.json").write_text('{"format_version": 99}')
    with pytest.raises(DemoError, match="format version 99, this release reads 1"):
        read_config(folder)


def test_rotary_positions_of_both_sizes_meet() -> None:
    small, large = SIZES["small"], SIZES["large"]
    (cos_small, _), (cos_large, _) = (rotary_embedding(size, 64, "cpu") for size in (small, large))
    assert cos_small.shape == (2304, 64)
    assert cos_large.shape == (18432, 64)
    coarse = cos_small.view(16, 12, 12, 64)
    fine = cos_large.view(32, 24, 24, 64)[:16, ::2, ::2]
    torch.testing.assert_close(coarse, fine, atol=1e-4, rtol=0)


@needs_weights
def test_shipped_weights_are_half_precision_and_small() -> None:
    from safetensors.torch import load_file

    assert WEIGHTS.stat().st_size <= 12_000_000
    state = load_file(WEIGHTS)
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


@needs_weights
def test_shipped_files_fit_a_moved_installation(tmp_path: Path) -> None:
    copy = shutil.copytree(shipped_folder(), tmp_path / "weights")
    assert load_model(folder=copy).transformer.config.num_layers == 4


@needs_weights
def test_model_card_quotes_the_training_record() -> None:
    record = json.loads((shipped_folder() / "training.json").read_text())
    card = (shipped_folder().parent / "MODEL_CARD.md").read_text()
    assert record["status"] == "complete"
    assert record["device"] in card
    assert f"{record['steps']:,} steps" in card
    for size in ("small", "large"):
        share = record["legibility"][f"{size}_steps15_guidance30"]["read_correctly"]
        assert f"{share:.0%}" in card
