"""`sage`: INT8 Q K^T and FP16 P V (SageAttention, arXiv 2410.02367)."""
