"""The commands of `python -m hpctrain.node`: the process on each node of a run or a probe, and the commands that the
job script calls. They never import torch."""
