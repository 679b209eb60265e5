"""Decides and carries out what happens to a run's Slurm jobs: what follows the end of an attempt, successors,
dependencies, bad nodes."""
