"""Benchmarks that compare hpctrain with other implementations, with an ideal or with measurements. Times that are
compared with each other are measured in turns within one launch, so that noise of the machine affects all of them
alike."""
