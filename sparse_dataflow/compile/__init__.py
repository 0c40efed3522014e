"""Steps compiled for chips that need not be there, and what their text says."""
