"""Collectives that send compressed gradients between ranks: all-gather, all-to-all and reduce-scatter."""
