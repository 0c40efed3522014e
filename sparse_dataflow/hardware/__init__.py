"""Chips with their rates, and what this process runs on."""
