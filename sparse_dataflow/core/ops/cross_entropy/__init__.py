"""Cross-entropy of a tied output layer."""
