"""Second-order pruning of one projection from the moments of its inputs, over arrays alone."""
