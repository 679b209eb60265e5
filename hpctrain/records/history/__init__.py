"""Files that a run writes: attempts, events, metrics, generations, checkpoint manifests, bad nodes."""
