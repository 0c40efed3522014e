"""What a run is: the one way from a flag, a file or Python to a training.

`run_config.RunConfig` holds seven parts: `model`, `sparsity`, `evolution`, `training`, `data`,
`parallel` and `run`.
"""
