"""A probe as a Slurm job or as local processes, and its progress."""
