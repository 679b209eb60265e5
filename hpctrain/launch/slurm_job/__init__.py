"""A run as a Slurm job: the request, the job script, and existing jobs or allocations that take the run."""
