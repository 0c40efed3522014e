"""A run, read downwards: `run_job` resolves, builds, trains and reports, each in its file."""
