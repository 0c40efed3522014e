"""What an experiment calls: command lines, training, evaluation, run folders and reports."""
