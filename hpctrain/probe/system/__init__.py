"""Reads facts about a node from its operating system and driver: CPUs, PCI, NVML, addresses and health."""
