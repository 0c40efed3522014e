"""Trained models: loaded, scored, compared, and continued from prompts."""
