"""What one reads: config, layouts, ops, weights, the model, executors and training.

A config names kinds of weights, which import the config and never the other way.  So they register
themselves here, before any module of this folder runs.
"""

import sparse_dataflow.core.weights.kinds  # noqa: F401
