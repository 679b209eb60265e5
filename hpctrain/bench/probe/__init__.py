"""Duration, findings and errors of the probe, on the lab and simulated."""
