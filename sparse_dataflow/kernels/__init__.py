"""A folder per op: `api.py` chooses, `reference.py` defines, one file per backend computes."""
