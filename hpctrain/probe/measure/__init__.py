"""Settings and raw measurements of a probe, the computation of a link's figures from samples, and the process that
measures devices."""
