"""What a machine and its cluster allow: collect facts, and decide what they mean for a run."""
