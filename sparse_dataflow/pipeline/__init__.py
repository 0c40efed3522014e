"""Pipeline parallelism: schedules as tables, and the programs that execute them."""
