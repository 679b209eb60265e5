"""What a layout costs in time: the pipeline step action by action, overlap, noise, and time lost to failures."""
