"""Models as ordered lists of sections."""
