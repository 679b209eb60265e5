"""Chooses the pairs that are measured, their order, and the pairs that are measured again."""
