"""What a node's system says of itself: CPUs, PCI, NVML, addresses and health."""
