"""Processes of one run: launcher detection, rendezvous, collectives, stall detection."""
