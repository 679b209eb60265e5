"""Evaluation and export of a checkpoint, each by a worker process."""
