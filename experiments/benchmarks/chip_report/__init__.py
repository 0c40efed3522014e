"""The rows of `chip_report`, each measured in a process of its own, and their page."""
