"""The planner against published runs, own runs, and exhaustive search."""
