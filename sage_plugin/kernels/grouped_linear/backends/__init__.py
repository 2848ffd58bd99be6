"""The backends of grouped linears; none imports dispatch, executor or api."""
