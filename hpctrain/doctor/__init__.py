"""What a machine and its cluster allow: collect facts, and say what they mean for a run."""
