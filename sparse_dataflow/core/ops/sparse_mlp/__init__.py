"""The block-sparse MLP as one op."""
