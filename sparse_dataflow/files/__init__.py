"""Errors in words, and files: storage that fails for a moment, JSON, links, manifests."""
