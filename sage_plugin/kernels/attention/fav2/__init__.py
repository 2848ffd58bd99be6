"""`fav2`: FlashAttention-2 without quantisation (arXiv 2307.08691)."""
