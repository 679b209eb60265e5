"""Measures a node's devices with torch for the probe: speed, memory, codecs and messages."""
