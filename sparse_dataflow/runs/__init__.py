"""What a run is: its settings, presets, models, and what goes with what."""
