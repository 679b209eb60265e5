"""Chooses the pairs of nodes that a probe measures, their order, and the pairs to measure again."""
