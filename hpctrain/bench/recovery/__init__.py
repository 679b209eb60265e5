"""Benchmarks of recovery: what checkpoints, state in memory and snapshots cost the training, whether checkpoints
survive killed workers, whether agents agree in spite of faults, and what a fault costs a job on a lab."""
