"""What a training run plans and checks before its first step."""
