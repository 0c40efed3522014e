"""Processes of one run: who they are, how they meet, and who is silent."""
