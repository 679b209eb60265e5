"""hpctrain's interface to Slurm: runs its commands (argv lists, no shell), parses their output with pure functions,
checks requests against limits, and watches jobs."""
