"""Reads what a node's system reports: CPUs, PCI, NVML, addresses and health."""
