"""Sends compressed gradients between ranks: all-gather, exchange and reduce-scatter."""
