"""Programs that only developers of hpctrain run: set up a machine, check texts and code, simulate and score."""
