"""Checkpoints with checksums, written so that a kill at any time loses no finished one."""
