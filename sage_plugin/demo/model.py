"""The demo model and its files: diffusers' CogVideoX transformer and a label embedding."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, cast

import safetensors
import torch
from diffusers import CogVideoXTransformer3DModel, ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from safetensors.torch import load_file, save
from torch import nn

from sage_plugin import files
from sage_plugin.demo.sizes import BASE_PX, PATCH_PX, DemoSize
from sage_plugin.errors import DemoError

FORMAT_VERSION = 1
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
TRAINING_FILE = "training.json"


class DigitEmbedding(ModelMixin, ConfigMixin):
    """Stands where a text encoder stands: a digit and a frame scale become a few tokens."""

    @register_to_config
    def __init__(self, num_classes: int, num_scales: int, num_tokens: int, embed_dim: int) -> None:
        """Create the tables; class `num_classes` is the empty label of classifier-free guidance."""
        super().__init__()
        self.digits = nn.Embedding(num_classes + 1, num_tokens * embed_dim)
        self.scales = nn.Embedding(num_scales, num_tokens * embed_dim)
        self.tokens_shape = (num_tokens, embed_dim)

    @property
    def empty_label(self) -> int:
        """The label that means "any digit"."""
        return self.digits.num_embeddings - 1

    def forward(self, labels: torch.Tensor, size: DemoSize) -> torch.Tensor:
        """Return token embeddings (B, tokens, dim) for labels (B,) at one clip geometry."""
        scales = torch.full_like(labels, size.scale - 1)
        return (self.digits(labels) + self.scales(scales)).unflatten(-1, self.tokens_shape)


@dataclass(frozen=True, slots=True)
class DemoModel:
    """The two modules that hold weights, and the settings they were built from."""

    transformer: CogVideoXTransformer3DModel
    label_embedding: DigitEmbedding
    config: Mapping[str, Any]

    def modules(self) -> nn.ModuleDict:
        """Return both modules under the prefixes that the weights file uses."""
        return nn.ModuleDict(
            {"transformer": self.transformer, "label_embedding": self.label_embedding}
        )


def shipped_folder() -> Path:
    """Return the folder of the package that holds config, weights and training record."""
    return Path(str(resources.files("sage_plugin.demo") / "weights"))


def read_config(folder: Path | None = None) -> dict[str, Any]:
    """Read `config.json` from `folder`, by default the shipped one."""
    path = (folder or shipped_folder()) / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        version = config["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DemoError(
            f"cannot read the demo model's settings {path}: {error}; reinstall sage-plugin"
        ) from error
    if version != FORMAT_VERSION:
        raise DemoError(
            f"{path} has format version {version!r}, this release reads {FORMAT_VERSION}; "
            "reinstall sage-plugin"
        )
    return cast("dict[str, Any]", config)


def build_model(config: Mapping[str, Any] | None = None) -> DemoModel:
    """Build the model with random weights, float32, on the CPU."""
    config = read_config() if config is None else config
    return DemoModel(
        CogVideoXTransformer3DModel(**config["transformer"]),
        DigitEmbedding(**config["label_embedding"]),
        config,
    )


def save_model(model: DemoModel, folder: Path) -> Path:
    """Write `model.safetensors` (float16) and `config.json`, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.detach().to("cpu", torch.float16).contiguous()
        for name, tensor in model.modules().state_dict().items()
    }
    weights, config = folder / WEIGHTS_FILE, folder / CONFIG_FILE
    files.write_atomically(weights, save(state))
    files.write_atomically(config, json.dumps(model.config, indent=2) + "\n")
    return weights


def load_model(
    *,
    folder: Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> DemoModel:
    """Load the trained model, ready for inference."""
    folder = folder or shipped_folder()
    path = folder / WEIGHTS_FILE
    model = build_model(read_config(folder))
    try:
        model.modules().load_state_dict(load_file(path))
    except FileNotFoundError as error:
        raise DemoError(
            f"the demo model's weights {path} are missing; reinstall sage-plugin, "
            "or train them with scripts/train_demo.py of the repository"
        ) from error
    except (safetensors.SafetensorError, RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DemoError(
            f"the demo model's weights {path} are damaged ({reason}); reinstall sage-plugin"
        ) from error
    model.modules().to(device=device, dtype=dtype).eval().requires_grad_(False)
    return model


def rotary_embedding(
    size: DemoSize, head_dim: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute rotary cosines and sines of a clip, each (video_tokens, head_dim), float32.

    Space is measured in patches of the smallest frame at every size and time in frames, so a larger
    frame is the same scene drawn finer: its patches lie at fractional positions in the same range.
    """
    extent = BASE_PX // PATCH_PX
    cos, sin = get_3d_rotary_pos_embed(
        head_dim, ((0, 0), (extent, extent)), size.grid, size.frames, device=torch.device(device)
    )
    return cos, sin
