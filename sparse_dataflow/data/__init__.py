"""Real text as shuffled, resumable batches of tokens."""
