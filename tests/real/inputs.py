"""The fixed inputs of the real models: a licence text, two of its passages, and made-up sound."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import torch

TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
TEXT_SHA256 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
TOKENS = 1300
"""Tokens of the text that SmolLM2 reads where nothing else is asked; the text has 2,224."""

PASSAGES = ((2000, 4000), (7200, 7900))
"""Where MiniLM's two passages begin and end, in characters: one is padded to the other."""

RATE = 16_000
SECONDS = 30


def text() -> str:
    """The Apache licence, checked: another text has another perplexity."""
    data = TEXT.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != TEXT_SHA256:
        raise ValueError(f"{TEXT} is not the text that the numbers were taken on ({found})")
    return data.decode("utf-8")


def token_ids(tokenizer: Any, tokens: int = TOKENS) -> torch.Tensor:
    """The first tokens of the text, (1, tokens)."""
    ids = tokenizer(text(), return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] != tokens:
        raise ValueError(f"the text has {ids.shape[1]} tokens, {tokens} were asked for")
    return ids


def padded_passages(tokenizer: Any) -> dict[str, torch.Tensor]:
    """Two passages in one batch, the shorter one padded."""
    passages = [text()[start:end] for start, end in PASSAGES]
    return dict(tokenizer(passages, padding=True, return_tensors="pt"))


def sound() -> torch.Tensor:
    """Half a minute that sounds a little like speech: voiced syllables, hiss, chirps and pauses."""
    time = torch.arange(SECONDS * RATE, dtype=torch.float64) / RATE
    pitch = 140 + 40 * torch.sin(2 * math.pi * 0.4 * time) + 6 * torch.sin(2 * math.pi * 5 * time)
    phase = 2 * math.pi * torch.cumsum(pitch / RATE, 0)
    formant = 600 + 350 * torch.sin(2 * math.pi * 1.3 * time)
    voiced = torch.zeros_like(time)
    for harmonic in range(1, 24):
        weight = torch.exp(-(((harmonic * pitch - formant) / 400) ** 2)) + 0.3 / harmonic
        voiced += weight * torch.sin(harmonic * phase)
    syllables = torch.sin(2 * math.pi * 2.1 * time).clamp_min(0) ** 0.5
    phrases = (torch.sin(2 * math.pi * 0.11 * time) > -0.6).double()
    chirp = torch.sin(2 * math.pi * (300 * time + 60 * time**2)) * (time % 7 > 5.5)
    generator = torch.Generator().manual_seed(0)
    hiss = torch.randn(time.shape, dtype=torch.float64, generator=generator)
    burst = (torch.sin(2 * math.pi * 2.1 * time + 2.2) > 0.9).double()
    mix = phrases * (0.25 * voiced * syllables + 0.08 * hiss * burst) + 0.1 * chirp + 0.002 * hiss
    return (mix / mix.abs().max()).float()


def spectrogram() -> torch.Tensor:
    """Log-mel features of `sound`, (1, 80, 3000), as Whisper hears them."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=80)
    features = extractor(sound().numpy(), sampling_rate=RATE, return_tensors="pt").input_features
    return torch.as_tensor(features)
