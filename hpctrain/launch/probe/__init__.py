"""Run a probe as a Slurm job or as local processes, and watch its progress."""
