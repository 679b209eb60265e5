"""The lab: a real Slurm of several nodes on this machine, with links to shape and nodes to kill."""
