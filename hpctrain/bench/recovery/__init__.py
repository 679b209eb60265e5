"""Time lost to a killed worker, and the time of a checkpoint."""
