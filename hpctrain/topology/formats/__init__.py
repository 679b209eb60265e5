"""Reads and writes other tools' topology files, one format per module; functions take and return text, not files."""
