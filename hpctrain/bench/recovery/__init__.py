"""Benchmarks of recovery: how long a checkpoint stalls the training, and whether checkpoints survive killed workers."""
