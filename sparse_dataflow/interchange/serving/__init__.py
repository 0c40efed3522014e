"""What other programs run of an export: compiled programs, and readers that are written with it."""
