"""State on disk: sharded checkpoints that appear whole or not at all. The module `published` does not import torch."""
