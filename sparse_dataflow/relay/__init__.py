"""The relay executor: one block at a time on the device, parameters and moments on the host."""
