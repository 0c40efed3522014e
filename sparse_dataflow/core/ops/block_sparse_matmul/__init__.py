"""The block-sparse matrix product."""
