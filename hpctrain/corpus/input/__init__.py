"""Reads the input files of `hpctrain data prepare` as documents: plain or compressed text, JSON lines, and tables."""
