"""Benchmarks of compression: step time, bytes and convergence of each method, and the cost of a codec's parts."""
