"""Reports of runs as self-contained HTML files, and figures of studies."""

import os

from sparse_dataflow.data import cache

# Before matplotlib is imported, which would otherwise write to ~/.config.
os.environ.setdefault("MPLCONFIGDIR", os.path.expanduser(cache.FOLDER.parent / "matplotlib"))
