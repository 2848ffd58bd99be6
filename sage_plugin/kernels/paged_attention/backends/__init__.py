"""What computes paged attention: an emulation in plain torch, and Triton kernels."""
