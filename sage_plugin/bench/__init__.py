"""Which inputs and kernels to compare, the comparison, and the rows that it gives.

Returns records; rendering is the command line's. Never imports `sage_plugin.tune`.
"""
