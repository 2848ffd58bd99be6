"""Time and its uncertainty, clocks, and the inputs to time: shared by `tune` and `bench`.

Knows functions and tensors, not kernels; accuracy is judged in `sage_plugin.accuracy`.
"""
