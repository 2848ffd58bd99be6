"""Recording real Q, K and V during inference, and reading them back.

Owns the capture folder: which calls are saved (`policy`, `selection`), how (`recorder`, `writer`),
the index (`manifest`), and the reader that trusts nothing it finds (`reader`, `checks`, `reduce`).
It works on what `plugin` hands to its listeners and imports neither a host library nor anything
that renders.
"""
