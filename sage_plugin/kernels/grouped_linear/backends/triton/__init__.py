"""The Triton backend of grouped linears."""
