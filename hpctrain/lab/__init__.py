"""The lab: a real Slurm of several nodes on this machine, whose links can be shaped and whose nodes can be killed."""
