"""Executors: how the sections of a model flow over devices and time."""
