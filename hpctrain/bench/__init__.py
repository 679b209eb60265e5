"""Benchmarks of hpctrain and another implementation, in turns within one launch, so that noise of the machine affects
both alike."""
