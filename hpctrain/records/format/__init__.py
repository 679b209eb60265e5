"""Reads, checks and writes the files of hpctrain: base classes of their models, YAML, JSON, JSON lines, names in files,
bounds, and errors with line numbers."""
