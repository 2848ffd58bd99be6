"""Rows in 8 bits: their format, what may come before, and what quantizes them in plain torch."""
