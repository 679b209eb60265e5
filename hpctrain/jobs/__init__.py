"""The life of a Slurm job over its attempts: what follows an end, successors, dependencies, bad nodes, exit codes."""
