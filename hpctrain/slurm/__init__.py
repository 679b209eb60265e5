"""hpctrain's interface to Slurm: parsers of its text (pure), its commands (argv lists, no shell), limits, a watcher."""
