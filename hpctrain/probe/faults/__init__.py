"""Finds faults of nodes, devices and the network in a probe's measurements."""
