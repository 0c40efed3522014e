"""Which blocks of a weight exist."""
