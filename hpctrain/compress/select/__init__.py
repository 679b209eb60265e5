"""Selects the gradients to send: densities, thresholds and kernels."""
