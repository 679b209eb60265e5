"""Simulates what a layout costs in time: the pipeline step by action, overlap, noise, and time lost to failures."""
