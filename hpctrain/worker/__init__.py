"""Processes that use torch: training, the device measurements of the probe, and other verbs on models."""
