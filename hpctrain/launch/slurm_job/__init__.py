"""A run as a Slurm job: checks before it is queued, the job script, and runs in a job or an allocation that exists
already."""
