"""Grouped linears, one weight for each group of rows: the experts of a mixture."""
