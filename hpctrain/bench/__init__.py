"""Benchmarks: hpctrain and another implementation measured in turns within one launch, so both see the same noise."""
