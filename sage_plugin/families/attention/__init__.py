"""Attention as tools see it: replayed, judged, costed and described; its entry is `entry.py`."""
