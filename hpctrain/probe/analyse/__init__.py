"""Makes a topology from a probe's measurements: link classes, clock offsets and the verdict."""
