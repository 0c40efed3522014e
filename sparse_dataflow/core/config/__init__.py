"""Model, sparsity and training as frozen dataclasses.

A field made by `settings.setting` is a setting: it has a path such as `training.batch`, a flag, a
line of help and its legal values.  To add a hyperparameter, add its field here, the code that reads
it, and a test.  `runs.run_config.RunConfig` holds these dataclasses and those of a run.
"""
