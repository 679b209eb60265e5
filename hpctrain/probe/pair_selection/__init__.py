"""Selects which pairs of nodes a probe measures in which round, and which it measures again. Infers from latencies
which nodes share a switch."""
