"""Experts of mixtures on grouped linears: found, quantized, run, put back."""
