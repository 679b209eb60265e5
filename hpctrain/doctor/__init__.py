"""What a machine and its cluster allow: facts gathered with every part of the house, and what they mean for a run."""
