"""Chooses the pairs of nodes that a probe measures, their rounds, and the pairs to measure again; infers switches."""
