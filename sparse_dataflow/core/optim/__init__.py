"""Optimizers, the training state that they update, and the handling of loss spikes."""
