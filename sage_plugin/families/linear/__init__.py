"""Linears, as tools see them: replayed, judged, costed."""
