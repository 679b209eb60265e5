"""The planner's search times, its predictions against runs on this machine, and the gain from placement."""
