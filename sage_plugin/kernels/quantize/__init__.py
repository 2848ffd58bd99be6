"""Quantization of Q, K and V before attention: torch emulations and one-pass Triton kernels.

Both give the same operands: Q with one scale a row (softmax scale and log2 e folded in), K without
its mean and one scale a block of keys, V without its mean and one scale a channel.
"""
