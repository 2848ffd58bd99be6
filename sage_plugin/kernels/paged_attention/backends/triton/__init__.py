"""Paged attention in Triton: one kernel for few and for many rows, and one that joins splits."""
