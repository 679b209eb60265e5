"""Run folders and the ways to start the node processes."""
