"""One file per published result; each is run as `python -m experiments.NAME`."""
