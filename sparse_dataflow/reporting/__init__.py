"""Reports of runs as self-contained HTML files, and figures of studies."""
