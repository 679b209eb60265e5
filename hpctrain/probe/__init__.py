"""Measures nodes, devices and links and makes a topology: contention-free rounds, bandwidth timed by the receiver."""
