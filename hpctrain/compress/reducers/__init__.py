"""Reducers, one file per mode: they sum gradients over replicas, and decide when each bucket is sent."""
