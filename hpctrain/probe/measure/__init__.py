"""Settings and rounds of a probe, and the computation of figures of pairs and devices from samples."""
