"""Commands on a run's checkpoint: evaluation and export."""
