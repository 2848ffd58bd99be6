"""The quantization pre-pass in Triton: Q, K and V are read once."""
