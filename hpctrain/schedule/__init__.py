"""Pipeline schedules as data: makes them by name, checks them, and resolves the one of a plan."""
