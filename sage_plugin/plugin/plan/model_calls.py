"""The attention calls of a model, from its configuration alone: no weights, no library of models.

A denoiser's configuration has its heads; how many tokens a picture or film makes of it is known by
class (`GEOMETRIES`), for the sizes that its pipeline draws by default or that are asked for. A
language model has heads and no length of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_plugin import files
from sage_plugin.errors import ConfigError, UsageError
from sage_plugin.schema import CallShape

MAX_FILE_BYTES = 4 * 2**20
SPLITS = ("heads", "seq")
SELF, CROSS = "self", "cross"
NAMES = ("config.json", "transformer/config.json", "unet/config.json")
CFG_IN_ONE_BATCH = 2
"""Batch of pipelines that draw with and without the prompt in one forward."""


@dataclass(frozen=True, slots=True)
class FilmSize:
    """Pixels of a picture, and how many of them a film has."""

    width: int
    height: int
    frames: int = 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a class of denoisers makes tokens.

    Attributes:
        pixels: side of the square that becomes one token.
        frames: frames that become one, after the first; 0 for pictures.
        text: text tokens.
        joint: text and picture attend as one sequence; else the text is attended across.
        usual: what its pipeline draws by default.
        batch: items of a forward.
        layout: how Q, K and V reach attention.
    """

    pixels: int
    frames: int
    text: int
    joint: bool
    usual: FilmSize
    batch: int = 1
    layout: str = "bshd"

    def tokens(self, size: FilmSize) -> int:
        """Return the tokens of a picture or film, without its text."""
        latents = 1 if not self.frames else (size.frames - 1) // self.frames + 1
        return latents * (size.width // self.pixels) * (size.height // self.pixels)


WAN = Geometry(16, 4, 512, False, FilmSize(832, 480, 81))
FLUX = Geometry(16, 0, 512, True, FilmSize(1024, 1024))
GEOMETRIES = {
    "CogVideoXTransformer3DModel": Geometry(
        16, 4, 226, True, FilmSize(720, 480, 49), CFG_IN_ONE_BATCH, "bhsd"
    ),
    "WanTransformer3DModel": WAN,
    "SkyReelsV2Transformer3DModel": dataclasses.replace(WAN, usual=FilmSize(960, 544, 97)),
    "HunyuanVideoTransformer3DModel": Geometry(16, 4, 256, True, FilmSize(1280, 720, 129)),
    "MochiTransformer3DModel": Geometry(
        16, 6, 256, True, FilmSize(848, 480, 19), CFG_IN_ONE_BATCH, "bhsd"
    ),
    "LTXVideoTransformer3DModel": Geometry(
        32, 8, 128, False, FilmSize(704, 512, 161), CFG_IN_ONE_BATCH
    ),
    "FluxTransformer2DModel": FLUX,
    "ChromaTransformer2DModel": FLUX,
    "QwenImageTransformer2DModel": Geometry(16, 0, 256, True, FilmSize(1328, 1328)),
    "SD3Transformer2DModel": Geometry(
        16, 0, 333, True, FilmSize(1024, 1024), CFG_IN_ONE_BATCH, "bhsd"
    ),
}
WAN_OF_LARGE_LATENTS = 48
"""Channels of latents whose squares are of 16 pixels, which makes tokens of 32."""


@dataclass(frozen=True, slots=True)
class ModelCall:
    """Calls of one shape in one forward of a model.

    Attributes:
        kind: `"self"` (text included where it is joint) or `"cross"`.
        layers: how many layers make it.
        shape: the call.
    """

    kind: str
    layers: int
    shape: CallShape


@dataclass(frozen=True, slots=True)
class CallWishes:
    """What is asked of a model; what is left out is as its pipeline does by default.

    Attributes:
        seq_lens: lengths, in place of those of the sizes.
        pixels: width and height of the picture or film.
        frames: of the film.
        batch: items of a forward.
        dtype: torch's name of a dtype.
    """

    seq_lens: Sequence[int] = ()
    pixels: tuple[int, int] | None = None
    frames: int | None = None
    batch: int | None = None
    dtype: str | None = None


def read_config(path: Path) -> Mapping[str, Any]:
    """Read the configuration of a model: a `config.json`, or a folder of a model or pipeline.

    Raises:
        UsageError: there is none.
        ConfigError: it is not strict JSON, or no object.
    """
    places = [path / name for name in NAMES] if path.is_dir() else [path]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise UsageError(f"{path}: no config.json of a model of diffusers or transformers there")
    config = files.read_json(found, MAX_FILE_BYTES, "configuration of a model")
    if not isinstance(config, dict):
        raise ConfigError(f"{found}: expected a JSON object")
    return config


def config_of(module: object) -> Mapping[str, Any]:
    """Return the configuration of a loaded model, as it would be saved.

    Raises:
        UsageError: it has none.
    """
    config, name = getattr(module, "config", None), type(module).__name__
    dtype = str(getattr(module, "dtype", "bfloat16")).removeprefix("torch.")
    if isinstance(config, Mapping):  # of diffusers
        return {**config, "_class_name": name, "dtype": dtype}
    to_dict = getattr(config, "to_dict", None)
    if to_dict is None:
        raise UsageError(f"{name} has no configuration that tells its attention calls")
    return {**to_dict(), "architectures": [name], "dtype": dtype}


def calls_of(config: Mapping[str, Any], wishes: CallWishes | None = None) -> tuple[ModelCall, ...]:
    """Return the attention calls of one forward.

    Args:
        config: a model's configuration, as diffusers and transformers save it.
        wishes: sizes and numbers that are not the default's.

    Raises:
        UsageError: the class is not known and no length was given, or heads are missing.

    Example:
        >>> wan = {"_class_name": "WanTransformer3DModel", "num_attention_heads": 12,
        ...        "attention_head_dim": 128, "num_layers": 30}
        >>> [(call.kind, call.layers, call.shape.seq_q) for call in calls_of(wan)]
        [('self', 30, 32760), ('cross', 30, 32760)]
    """
    wishes = wishes or CallWishes()
    if "_class_name" in config:
        return tuple(_of_denoiser(config, wishes))
    return tuple(_of_language_model(config, wishes))


def local_shape(shape: CallShape, devices: int, split: str = "heads") -> CallShape:
    """Return the part of a call that one of several devices computes.

    Args:
        shape: the whole call.
        devices: how many share it.
        split: `"heads"`, those of K and V too, or `"seq"`, the queries.

    Raises:
        UsageError: what is split does not divide, or `split` is another word.
    """
    if devices < 1:
        raise UsageError(f"--tp-size {devices}: must be at least 1")
    if split not in SPLITS:
        raise UsageError(f"--tp-split-dim {split!r}: allowed are {', '.join(SPLITS)}")
    names = ("seq_q",) if split == "seq" else ("heads_q", "heads_k")
    for name in names:
        if getattr(shape, name) % devices:
            raise UsageError(f"--tp-size {devices} does not divide {name} {getattr(shape, name)}")
    return dataclasses.replace(shape, **{name: getattr(shape, name) // devices for name in names})


def _of_denoiser(config: Mapping[str, Any], wishes: CallWishes) -> Iterator[ModelCall]:
    name = config["_class_name"]
    heads, dim = _whole(config, "num_attention_heads"), _whole(config, "attention_head_dim")
    layers = _whole(config, "num_layers") + int(config.get("num_single_layers") or 0)
    geometry = _geometry(config)
    if geometry is None and not wishes.seq_lens:
        raise UsageError(
            f"how many tokens {name} makes is not known (it is of {', '.join(GEOMETRIES)}): give "
            "their number with --seq-len"
        )
    usual = geometry or dataclasses.replace(FLUX, text=0)
    size = FilmSize(
        *(wishes.pixels or (usual.usual.width, usual.usual.height)),
        usual.usual.frames if wishes.frames is None else wishes.frames,
    )
    whole = usual.tokens(size) + (usual.text if usual.joint else 0)
    if whole < 1:
        raise UsageError(f"{name} makes no token of {size.width}x{size.height} pixels")
    batch = wishes.batch or usual.batch
    dtype = wishes.dtype or str(config.get("dtype") or "bfloat16")
    for seq in wishes.seq_lens or (whole,):
        own = _shape(batch, heads, heads, seq, seq, dim, dtype, layout=usual.layout)
        yield ModelCall(SELF, layers, own)
        if not usual.joint:
            yield ModelCall(CROSS, layers, dataclasses.replace(own, seq_k=usual.text))


def _geometry(config: Mapping[str, Any]) -> Geometry | None:
    """How a model makes tokens, with what its own configuration says of it."""
    geometry = GEOMETRIES.get(str(config["_class_name"]))
    if geometry is None:
        return None
    if geometry.pixels == WAN.pixels and config.get("in_channels") == WAN_OF_LARGE_LATENTS:
        return dataclasses.replace(geometry, pixels=2 * WAN.pixels)
    if "max_text_seq_length" in config:
        geometry = dataclasses.replace(geometry, text=_whole(config, "max_text_seq_length"))
    if {"sample_width", "sample_height", "sample_frames"} <= config.keys():
        to_pixels = geometry.pixels // int(config.get("patch_size") or 2)
        width, height = (_whole(config, f"sample_{side}") for side in ("width", "height"))
        size = FilmSize(width * to_pixels, height * to_pixels, _whole(config, "sample_frames"))
        geometry = dataclasses.replace(geometry, usual=size)
    return geometry


def _of_language_model(config: Mapping[str, Any], wishes: CallWishes) -> Iterator[ModelCall]:
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config = {**config, **inner}
    name = str(next(iter(config.get("architectures") or ()), config.get("model_type", "model")))
    if config.get("kv_lora_rank"):
        raise UsageError(f"{name}: latent attention, whose heads of V are of another width")
    heads = _whole(config, "num_attention_heads")
    heads_k = int(config.get("num_key_value_heads") or heads)
    dim = int(config.get("head_dim") or _whole(config, "hidden_size") // heads)
    if heads % heads_k:
        raise UsageError(f"{name}: {heads} heads are no multiple of {heads_k} key heads")
    if not wishes.seq_lens:
        raise UsageError(f"{name} has no length of its own: give one with --seq-len, such as 8192")
    dtype = wishes.dtype or str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    causal = "Encoder" not in name and "MaskedLM" not in name and config.get("is_decoder", True)
    layers = _whole(config, "num_hidden_layers")
    for seq in wishes.seq_lens:
        shape = _shape(wishes.batch or 1, heads, heads_k, seq, seq, dim, dtype, causal=bool(causal))
        yield ModelCall(SELF, layers, shape)


def _shape(
    batch: int, heads_q: int, heads_k: int, seq_q: int, seq_k: int, dim: int, dtype: str,
    *, layout: str = "bhsd", causal: bool = False,
) -> CallShape:  # fmt: skip
    return CallShape(
        batch=batch, heads_q=heads_q, heads_k=heads_k, seq_q=seq_q, seq_k=seq_k, head_dim=dim,
        dv=dim, dtype=dtype, causal=causal, mask_kind="none", layout=layout, scale=dim**-0.5,
    )  # fmt: skip


def _whole(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"the model's configuration has no usable {name} (got {value!r})")
    return value
