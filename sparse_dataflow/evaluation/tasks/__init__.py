"""Built-in evaluation tasks from held-out documents."""
