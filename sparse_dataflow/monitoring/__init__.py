"""What a training run shows while it trains: metrics, trackers, goodput, profiles, alerts."""
