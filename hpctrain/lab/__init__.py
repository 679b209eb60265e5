"""The lab: a real Slurm of several virtual nodes on this machine, whose links can be shaped and whose nodes can be
killed."""
