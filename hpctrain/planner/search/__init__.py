"""The search over degrees, schedules and placements: candidates, their bounds, and local search."""
