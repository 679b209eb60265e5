"""hpctrain: from an sbatch account to a Transformer training run that knows its network and survives losing nodes."""

__version__ = "0.1.0"
