"""`fav3_sage`: INT8 Q K^T and FP8 P V (SageAttention2, arXiv 2411.10958)."""
