"""Compression methods compared: time, bytes, convergence, and the cost of their parts."""
