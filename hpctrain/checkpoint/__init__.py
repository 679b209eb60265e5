"""Checkpoints on disk: sharded over the ranks that write them, loadable under any plan, and visible only when they are
whole. The module `published` does not import torch."""
