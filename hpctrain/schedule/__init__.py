"""Pipeline schedules as data: makes action tables by a schedule's name, checks them, and finds the table of a plan."""
