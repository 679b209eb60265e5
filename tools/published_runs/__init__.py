"""Compares the cost model's predictions with published runs of other frameworks, and fits its constants to such
runs."""
