"""The checks of `hpctrain selfcheck` that use torch: each runs one path of the devices or of the training code once."""
