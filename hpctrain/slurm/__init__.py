"""Slurm as hpctrain sees it: parsers of its text (pure), its commands (argv lists, no shell), limits, one watcher."""
