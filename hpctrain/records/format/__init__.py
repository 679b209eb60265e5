"""Reads and writes every file: frozen models, YAML, JSON, JSON lines, bounds, and errors with their line."""
