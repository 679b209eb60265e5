"""Makes a topology from measurements: link classes, clock offsets and the verdict."""
