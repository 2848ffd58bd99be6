"""Captured and drawn calls replayed: loaded, brought to their full size, judged and run."""
