"""The parts of `experiments.serving_cost`."""
