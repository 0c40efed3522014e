"""The study of structured models against the best dense model of equal training FLOPs."""
