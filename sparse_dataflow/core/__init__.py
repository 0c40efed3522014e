"""What one reads: config, layouts, ops, weights, the model, executors and training."""
