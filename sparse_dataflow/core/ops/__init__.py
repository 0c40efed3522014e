"""One folder per op: `api.py` dispatches, `reference.py` defines, one file implements a backend."""
