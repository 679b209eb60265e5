"""How gradients are summed over replicas, a file for each mode, and when each bucket leaves."""
