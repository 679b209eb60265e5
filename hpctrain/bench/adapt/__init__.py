"""Bench of adapting: what a run on a lab does when nodes and links become slower, recover, or are only noisy."""
