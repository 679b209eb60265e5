"""Compresses gradients and sums them over replicas."""
