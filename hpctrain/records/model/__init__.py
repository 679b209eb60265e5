"""Models without tensors: families, presets, and the counts that planner and workers use."""
