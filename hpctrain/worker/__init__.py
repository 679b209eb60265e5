"""The processes that hold tensors: training, and the device half of the probe."""
