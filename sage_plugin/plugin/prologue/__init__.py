"""Norm and rotary embedding of Q and K, put off by patched processors and done in one pass."""
