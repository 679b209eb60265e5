"""Reads facts about this node from its operating system and drivers: CPUs, PCI devices, GPUs, addresses and health."""
