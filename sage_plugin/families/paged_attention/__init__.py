"""Paged attention, as tools see it: drawn, judged, costed."""
