"""Models as dimensions without tensors: families, presets, and counts of their parameters, FLOPs and bytes."""
