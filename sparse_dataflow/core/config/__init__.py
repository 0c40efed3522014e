"""What a run is, as frozen dataclasses: the one way from a flag, a file or Python to a training.

`RunConfig` holds seven parts: `model`, `sparsity`, `evolution`, `training`, `data`, `parallel` and
`run`.  A field made by `settings.setting` is a setting: it has a path such as `training.batch`, a
flag, a line of help and its legal values.  To add a hyperparameter, add its field here, the code
that reads it, and a test.
"""
