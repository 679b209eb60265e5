"""hpctrain's interface to Slurm: its commands (argv lists, no shell), pure parsers of their output, limits, and a
watcher of jobs."""
