"""Recording real inputs of operations during inference, and reading them back.

Owns the capture folder: how calls of an op family are met (`ops`), which are saved (`selection`),
how (`recording`), and index, writer and the reader that trusts nothing it finds (`store`).
It works on what `plugin` hands to its listeners and imports neither a host library nor anything
that renders.
"""
