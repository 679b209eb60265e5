"""Settings and rounds of a probe, and the figures of pairs and devices."""
