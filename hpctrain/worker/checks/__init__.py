"""Bodies of `hpctrain selfcheck`: each runs one path of the device or of the training code once."""
