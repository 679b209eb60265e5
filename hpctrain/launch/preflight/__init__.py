"""Checks of what a person gave, before anything starts."""
