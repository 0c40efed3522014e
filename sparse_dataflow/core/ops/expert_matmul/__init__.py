"""Products of rows, sorted by expert, with the matrices of their experts."""
