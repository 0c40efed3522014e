"""Arrays in verified folders, written so that a kill loses no older one."""
