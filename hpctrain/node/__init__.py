"""The process on each node of a run: it uses agent, planner, probe and the run folder, and never imports torch."""
