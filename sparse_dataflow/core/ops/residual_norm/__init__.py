"""The addition to a residual stream and the norm that reads it, as one op."""
