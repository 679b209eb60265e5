"""What a run writes while it lives: attempts, events, metrics, generations, checkpoints' manifests, bad nodes."""
