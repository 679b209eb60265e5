"""Finds faults of nodes, devices and links in the measurements."""
