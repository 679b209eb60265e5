"""Bandwidth, duration, findings and errors of the probe on a lab."""
