"""Which gradients are sent: thresholds, densities and the kernels that pick them."""
