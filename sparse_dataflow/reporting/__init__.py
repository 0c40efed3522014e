"""A run's results as one self-contained HTML file."""
