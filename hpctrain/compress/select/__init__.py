"""Selects the numbers of a gradient that are sent: how many of each tensor, and by which rule."""
