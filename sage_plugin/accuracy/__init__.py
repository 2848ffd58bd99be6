"""How far an output is from exact attention, and the limits that it must keep.

Shared by `tune` and `bench`. Runs kernels through their public entry, and times nothing.
"""
