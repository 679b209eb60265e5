"""The planner's search times, its predictions against runs on this machine, and what placement is worth."""
