"""Settings of a probe, its raw measurements, and the computation of figures of pairs and devices from samples."""
