"""Descriptions of models without tensors: families, presets, and counts of parameters, FLOPs and bytes."""
