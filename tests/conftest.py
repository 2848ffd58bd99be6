"""Shared by all tests: without a GPU, Triton kernels run in its interpreter with correct casts."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
