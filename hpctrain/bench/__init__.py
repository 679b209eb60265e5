"""Benchmarks that compare hpctrain with other implementations, with an ideal or with measurements. Times that are
compared are measured in turns within one launch, so that noise of the machine affects both alike."""
