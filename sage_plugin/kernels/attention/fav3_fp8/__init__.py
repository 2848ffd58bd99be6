"""`fav3_fp8`: FP8 Q K^T and FP8 P V (FlashAttention-3's formats, arXiv 2407.08608)."""
