"""Pipeline schedules as data: made by name, checked, and resolved from a plan."""
