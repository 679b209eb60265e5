"""Processes that use torch: training, the probe's device measurements, and other verbs on models."""
