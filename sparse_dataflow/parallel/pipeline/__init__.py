"""Stages in space: schedules as tables, and the programs that follow them."""
