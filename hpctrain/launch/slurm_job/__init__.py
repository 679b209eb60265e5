"""A run as a Slurm job: the request, the job script, and jobs or allocations that a person already has."""
