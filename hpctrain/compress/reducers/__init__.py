"""Reducers: they sum gradients over replicas, one file per mode, and decide when each bucket is sent."""
