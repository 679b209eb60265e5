"""Compresses gradients and sums them over replicas; compresses the messages between pipeline stages."""
