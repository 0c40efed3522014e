"""Attention of new tokens to a key-value cache."""
