"""The run folder: its layout, who may write to it, how it is found, its copy of the code, secrets and pruning."""
