"""State on disk: sharded checkpoints that appear whole or not at all. `published` needs no torch."""
