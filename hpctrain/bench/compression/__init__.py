"""Compression methods side by side: time, bytes, convergence, and their pieces."""
