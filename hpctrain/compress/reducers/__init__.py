"""Reducers: how gradients are summed over replicas, one file per mode, and when each bucket is sent."""
