"""The backends of linears; none imports dispatch, executor or api."""
