"""Executors: how the sections of a model run on devices and over time."""
