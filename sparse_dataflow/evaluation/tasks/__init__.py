"""The project's own tasks: questions cut from held-out documents."""
