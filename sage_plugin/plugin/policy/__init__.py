"""Policies: which kernel runs for which layer and which denoising steps."""
