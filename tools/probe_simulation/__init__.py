"""The probe on simulated fabrics of up to 1,000 nodes: `python -m tools.probe_simulation` prints how accurate and
how fast the probe is."""
