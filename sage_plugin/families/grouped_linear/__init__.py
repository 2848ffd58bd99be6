"""Grouped linears, as tools see them; what they share with linears is there."""
