"""Models of the files that a run writes (attempts, events, metrics, generations, checkpoint manifests, bad nodes), and
the table of faults."""
