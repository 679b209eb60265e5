"""Which pairs are measured in which order, and which of them again."""
