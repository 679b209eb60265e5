"""The planner compared with published runs, with runs on this machine, and with exhaustive search."""
