"""Ahead-of-time compilation of training steps for described chips, and analysis of the result."""
