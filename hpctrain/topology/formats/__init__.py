"""Reads and writes the topology files of other tools: Slurm, NCCL, Metis, ASTRA-sim, and CSV. Functions take and return
text; their callers read and write the files."""
