"""The process of each node: composes agent, planner, probe and the run folder. Never imports torch."""
