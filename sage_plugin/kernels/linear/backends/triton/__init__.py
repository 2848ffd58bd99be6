"""Quantizers of rows and products of 8-bit matrices in Triton."""
