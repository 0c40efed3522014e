"""What the planner's experiments compute and print."""
