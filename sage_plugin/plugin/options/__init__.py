"""The arguments of `patch`, checked before anything is touched."""
