"""Evaluate and export a checkpoint, each in a worker process."""
