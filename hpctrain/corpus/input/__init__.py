"""Reads input files as documents: plain or compressed text, JSON lines, and tables."""
