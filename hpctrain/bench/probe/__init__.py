"""Benchmarks of the probe on a lab: the error of its bandwidths, its duration, and whether it names faults."""
