"""What models are made of, without tensors: families, presets, and the counts that planner and workers ask for."""
