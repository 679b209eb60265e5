"""Checks of a run's inputs, before anything starts."""
