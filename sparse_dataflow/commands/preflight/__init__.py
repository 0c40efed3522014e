"""What a training run plans and checks before its first step, and how a relay plan came out."""
