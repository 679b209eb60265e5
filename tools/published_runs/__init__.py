"""Compares the cost model with published runs, and fits its constants to them."""
