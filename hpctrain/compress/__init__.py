"""Reduction of gradients between replicas."""
