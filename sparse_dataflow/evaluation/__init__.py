"""Evaluation and generation with trained models."""
