"""The example's modules, imported as its scripts import them, in an empty working folder."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cogvideo"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No network, no GPU, no configs, and nothing written but into a folder of the test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    for name in ("CONFIG_DIR", "KERNEL", "VARIANT", "LAUNCH", "DISABLE"):
        monkeypatch.delenv(f"SAGE_PLUGIN_{name}", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.fixture(scope="session")
def tiny_cogvideox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole CogVideoX pipeline, tiny and with random weights."""
    import diffusers
    from transformers import T5Config, T5EncoderModel, T5Tokenizer

    torch.manual_seed(0)
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -1.0), ("a", -2.0)]
    tokenizer = T5Tokenizer(vocab=pieces, extra_ids=0)
    text = T5Config(vocab_size=len(pieces), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2,
        time_embed_dim=8, text_embed_dim=16, sample_width=8, sample_height=8, sample_frames=9,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4, up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8,) * 4, latent_channels=4, layers_per_block=1, norm_num_groups=2,
    )  # fmt: skip
    pipe = diffusers.CogVideoXPipeline(
        tokenizer=tokenizer, text_encoder=T5EncoderModel(text).eval(), vae=vae,
        transformer=transformer, scheduler=diffusers.CogVideoXDDIMScheduler(),
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "tiny_cogvideox"
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture
def generate() -> ModuleType:
    return importlib.import_module("generate")


@pytest.fixture
def compare() -> ModuleType:
    return importlib.import_module("compare")
