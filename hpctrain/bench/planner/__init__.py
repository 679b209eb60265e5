"""Benchmarks of the planner: its search times, its predictions against runs on this machine, and the gain from
placement."""
