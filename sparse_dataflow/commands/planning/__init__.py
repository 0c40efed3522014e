"""Planning runs: searches, compiled plans, and the planner's errors against published runs."""
